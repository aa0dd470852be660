"""Runs in every worker and every server: sums, broadcasts and messages between processes."""
