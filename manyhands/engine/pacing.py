"""What may hold the steps of this process up and choose their batches: a planner that measures the job as it is."""

from collections.abc import Sequence
from typing import Any, Protocol

from manyhands.engine.engine import Engine


class Pacer(Protocol):
    """Told of every step of every session of this process."""

    def begin(self, engine: Engine, batches: Sequence[Any]) -> Sequence[Any]:
        """A step, or a backward pass of one, is about to begin; returns the batches to make it with."""

    def end(self) -> None:
        """A step has been made."""


pacers: list[Pacer] = []
"""Empty in every run that is not measured so."""


def begin(engine: Engine, batches: Sequence[Any]) -> Sequence[Any]:
    for pacer in pacers:
        batches = pacer.begin(engine, batches)
    return batches


def end() -> None:
    for pacer in pacers:
        pacer.end()
