"""Runs in every worker: the client of the servers."""
