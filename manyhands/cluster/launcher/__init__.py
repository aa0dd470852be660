"""Runs in the launcher: starts the processes of a host, watches them, and ends the run."""
