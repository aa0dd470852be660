"""Processes and hosts: one folder per process of a run, and `launchers`, which every process reads."""
