"""One training script, any published way of distributing it.

>>> import manyhands as mh
>>> session = mh.session(model, optimizer, loss)          # doctest: +SKIP
>>> for batch in session.batches(dataset, batch_size=32): # doctest: +SKIP
...     session.step(batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["ManyhandsError", "Session", "__version__", "accuracy", "session"]

if TYPE_CHECKING:
    from manyhands.errors import ManyhandsError
    from manyhands.evaluating import accuracy
    from manyhands.sessions import Session, session

_HOMES = {
    "ManyhandsError": "manyhands.errors",
    "Session": "manyhands.sessions",
    "accuracy": "manyhands.evaluating",
    "session": "manyhands.sessions",
}


def __getattr__(name: str) -> Any:
    """Imported on first use: the launcher needs none of it and should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
