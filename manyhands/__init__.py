"""One training script, any published way of distributing it.

>>> import manyhands as mh
>>> session = mh.session(model, optimizer, loss)          # doctest: +SKIP
>>> for batch in session.batches(dataset, batch_size=32): # doctest: +SKIP
...     session.step(batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["ManyhandsError", "Session", "__version__", "accuracy", "rank", "session"]

if TYPE_CHECKING:
    from manyhands.engine.evaluate import accuracy
    from manyhands.engine.session import Session, session
    from manyhands.engine.worker_process import rank
    from manyhands.errors import ManyhandsError

_HOMES = {
    "ManyhandsError": "manyhands.errors",
    "Session": "manyhands.engine.session",
    "accuracy": "manyhands.engine.evaluate",
    "rank": "manyhands.engine.worker_process",
    "session": "manyhands.engine.session",
}


def __getattr__(name: str) -> Any:
    """Imported on first use: the launcher needs none of it and should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
