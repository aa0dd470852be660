"""Runs in every server: its shard of the parameters, and what it answers."""
