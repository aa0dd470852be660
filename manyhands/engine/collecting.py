"""Bytes of all workers to all, once they have come together: all get them, or none does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manyhands.engine.elastic import can_go_on
from manyhands.engine.engine import Engine, Transaction


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


@contextmanager
def without_change(engine: Engine, finish: Callable[[float], None], loss: float = 0.0) -> Iterator[None]:
    """Like `step.transaction_of`, for something that leaves the parameters as they are."""
    engine.transaction = transaction = Transaction(undo=None, finish=finish, loss=loss, changes_nothing=True)
    yield
    transaction.is_done = True
    if can_go_on(engine):
        engine.world.exchange([])  # a worker that passes this barrier knows that all have done their part
    finish(loss)
    engine.transaction = None
