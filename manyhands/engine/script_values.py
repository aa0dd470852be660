"""Values of the script, from all workers to all: `session.gather`, `session.mean` and `session.barrier`.

All workers come together first, as they do for an evaluation. What travels is plain data and tensors: nothing is
unpickled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.engine import pause
from manyhands.engine.collecting import collect
from manyhands.engine.engine import Engine
from manyhands.engine.handshake import COLLECT
from manyhands.engine.plain_values import decode, encode
from manyhands.errors import UsageError
from manyhands.replica.returned import number_in

Call = Callable[[Callable[[], None], Callable[[], None]], None]
"""How a session makes a call that all scripts make equally often: an attempt, and what it does instead of those that
the other workers made before this one joined."""


def gather(engine: Engine, value: Any, call: Call) -> list[Any]:
    """The values of all workers that call it, by rank."""
    payload = encode(value)
    found: list[list[bytes]] = []

    def attempt() -> None:
        if not found:
            if engine.has_entered:
                pause.gather(engine, COLLECT)
            collect(engine, payload, found.append)

    call(attempt, lambda: None)
    return [decode(row) for row in found[0] if row] if found else [value]


def mean(engine: Engine, value: Any, samples: float | None, call: Call) -> Any:
    """The mean over the workers, of each number in a value."""
    rows = gather(engine, [value, 1.0 if samples is None else float(samples)], call)
    total = sum(weight for _, weight in rows)
    if not total:
        return value
    found = _sum([one for one, _ in rows], [weight / total for _, weight in rows])
    return _like(value, found)


def _sum(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """In the order of the workers, so that all get the same bits."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _sum([value[key] for value in values], weights) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_sum(items, weights) for items in zip(*values, strict=True))
    if isinstance(first, (str, bytes, type(None))):
        raise UsageError(
            f"session.mean takes numbers, tensors, and tuples or dicts of them; not {first!r:.40}"
        )
    if isinstance(first, Tensor) and not first.is_floating_point() and not first.is_complex():
        values = [value.to(torch.float32) for value in values]
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def _like(value: Any, found: Any) -> Any:
    """What was found, on the devices of what was given."""
    if isinstance(value, Tensor):
        return found.to(value.device)
    if isinstance(value, Mapping):
        return {key: _like(item, found[key]) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(found)(_like(item, other) for item, other in zip(value, found, strict=True))
    return found


def log(engine: Engine, values: Mapping[str, Any]) -> None:
    """Record numbers of the script beside those of its last step."""
    telemetry.event(
        "log",
        step=engine.progress.steps,
        epoch=engine.progress.epoch,
        values={name: number_in(value) for name, value in values.items()},
    )
