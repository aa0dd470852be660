"""Runs in the fork server: loads PyTorch once and forks the workers."""
