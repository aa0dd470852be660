"""Runs in every worker and every server: host memory, sockets and Gloo, below the collectives."""
