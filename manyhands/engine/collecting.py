"""Bytes of all workers to all, once they have come together: all get them, or none does."""

from collections.abc import Callable

from manyhands.engine.engine import Engine
from manyhands.engine.transaction import without_change


def collect(engine: Engine, payload: bytes, keep: Callable[[list[bytes]], None]) -> None:
    """`keep` gets the bytes of every worker, by rank; those of a worker that has nothing to say are empty."""
    rows: list[bytes] = []

    def finish(loss: float) -> None:
        engine.progress.commits += 1
        keep(rows)

    with without_change(engine, finish):
        rows += engine.world.gather(payload)


def nothing(rows: list[bytes]) -> None:
    """For a worker that takes part in what others want to know."""
