"""Runs in every worker: from backward's gradients to the vector that an update uses."""
