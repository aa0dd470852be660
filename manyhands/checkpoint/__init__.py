"""Save and restore a run: whole checkpoints that no crash can tear, and plain files of weights."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.checkpoint.index import latest
    from manyhands.checkpoint.store import load, save
    from manyhands.checkpoint.weights import save_weights

__all__ = ["latest", "load", "save", "save_weights"]

_HOMES = {"latest": "index", "load": "store", "save": "store", "save_weights": "weights"}


def __getattr__(name: str) -> Any:
    """Imported on first use: the launcher and the process that writes checkpoints do without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"manyhands.checkpoint.{_HOMES[name]}"), name)
