"""Runs in tests and benchmarks: several hosts emulated on one machine."""
