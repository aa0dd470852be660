"""Runs in every worker: the session, its step, and how it survives, saves and resumes."""
