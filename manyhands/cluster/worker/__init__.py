"""Runs in every worker and every server: how it starts, joins the run and leaves it."""
