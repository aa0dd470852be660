"""Runs in every worker, and in servers that update parameters: the optimizer's updates."""
