"""Runs in every process: which launcher has started it, with which rank; one launcher per file."""
