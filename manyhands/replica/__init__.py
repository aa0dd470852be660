"""Runs in every worker: the parameters of one replica, their gradients and their updates."""
