"""Runs in every worker and every server: the messages between them, and how parameters are split."""
