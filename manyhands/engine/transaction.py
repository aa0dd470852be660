"""What all workers commit, or none: how a worker keeps what it needs to take it back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manyhands.engine.elastic import can_go_on
from manyhands.engine.engine import Engine, Transaction
from manyhands.replica.state.inheritance import Undo


@contextmanager
def transaction_of(
    engine: Engine, finish: Callable[[float], None], *, is_joint: bool
) -> Iterator[Transaction]:
    """Something that counts for all workers or for none. `is_joint` is whether the other workers depend on it: then,
    should one of them die in it, all that are left roll it back or all commit it."""
    guarded = is_joint and engine.generation.is_own and can_go_on(engine)
    copies, commits = engine.generation.part_copies, engine.progress.commits
    put_back = (lambda: copies.put_back(commits)) if copies is not None else None
    transaction = Transaction(
        undo=Undo(engine.replica, put_back) if guarded else None,
        finish=finish,
        loss=engine.progress.last_loss,
    )
    engine.transaction = transaction if is_joint else None
    yield transaction
    if is_joint and copies is not None:
        copies.make(commits + 1)
    transaction.is_done = True
    if guarded:
        engine.world.exchange([])  # a worker that passes this barrier knows that all have done their part
    finish(transaction.loss)
    engine.transaction = None


@contextmanager
def without_change(engine: Engine, finish: Callable[[float], None], loss: float = 0.0) -> Iterator[None]:
    """The same for something that leaves the parameters as they are."""
    engine.transaction = transaction = Transaction(undo=None, finish=finish, loss=loss, changes_nothing=True)
    yield
    transaction.is_done = True
    if can_go_on(engine):
        engine.world.exchange([])  # a worker that passes this barrier knows that all have done their part
    finish(loss)
    engine.transaction = None
