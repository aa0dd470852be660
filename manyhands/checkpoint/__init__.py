"""Save and restore a run: whole checkpoints that no crash can tear, and plain files of weights."""

from manyhands.checkpoint.shelf import latest
from manyhands.checkpoint.store import load, save
from manyhands.checkpoint.weights import save_weights

__all__ = ["latest", "load", "save", "save_weights"]
