"""One training script, any published way of distributing it.

>>> import manyhands as mh
>>> session = mh.session(model, optimizer, loss)          # doctest: +SKIP
>>> for batch in session.batches(dataset, batch_size=32): # doctest: +SKIP
...     session.step(batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "ManyhandsError",
    "RunFailed",
    "Session",
    "__version__",
    "accuracy",
    "data",
    "errors",
    "fit",
    "main_process_first",
    "models",
    "over_all",
    "per_class",
    "prepare",
    "rank",
    "run",
    "session",
    "strategies",
    "workers",
]

if TYPE_CHECKING:
    from manyhands import data, errors, models, strategies
    from manyhands.adapters.fit import fit
    from manyhands.adapters.prepare import prepare
    from manyhands.engine.class_counts import per_class
    from manyhands.engine.evaluate import accuracy, over_all
    from manyhands.engine.main_first import main_process_first
    from manyhands.engine.session import Session, session
    from manyhands.engine.worker_process import rank, workers
    from manyhands.errors import ManyhandsError, RunFailed
    from manyhands.launching.call import run

_PARTS = {"data", "errors", "models", "strategies"}
_HOMES = {
    "ManyhandsError": "manyhands.errors",
    "RunFailed": "manyhands.errors",
    "Session": "manyhands.engine.session",
    "accuracy": "manyhands.engine.evaluate",
    "fit": "manyhands.adapters.fit",
    "main_process_first": "manyhands.engine.main_first",
    "over_all": "manyhands.engine.evaluate",
    "per_class": "manyhands.engine.class_counts",
    "prepare": "manyhands.adapters.prepare",
    "rank": "manyhands.engine.worker_process",
    "run": "manyhands.launching.call",
    "session": "manyhands.engine.session",
    "workers": "manyhands.engine.worker_process",
}


def __getattr__(name: str) -> Any:
    """Imported on first use: the launcher needs none of it and should not wait for torch."""
    if name in _PARTS:
        return importlib.import_module(f"manyhands.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What completion offers, also before it is imported."""
    return sorted(__all__)
