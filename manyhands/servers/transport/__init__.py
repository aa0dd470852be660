"""Runs in every worker and every server: how their messages travel."""
