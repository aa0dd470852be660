"""Runs in every worker: how a replica's state is shared, saved and taken over."""
