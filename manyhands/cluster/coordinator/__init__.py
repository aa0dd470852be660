"""Runs in the coordinator: which workers belong to the run, generation after generation."""
