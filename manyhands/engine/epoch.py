"""The loops of a script over its data: what this worker gets of an epoch, loaded ahead in the background."""

from collections.abc import Generator, Iterable, Iterator
from typing import Any

from manyhands.data.loading import prefetch
from manyhands.engine.engine import Engine
from manyhands.engine.pause import end_of_data
from manyhands.engine.step import together


def of_data_set(engine: Engine, data: Any, *, batch_size: int, shuffle: bool) -> Iterator[Any]:
    """This worker's share of a data set."""
    feed, progress = engine.feed, engine.progress
    begins = feed.begin(
        data,
        epoch=progress.epoch,
        seed=progress.seed,
        batch=batch_size,
        shuffle=shuffle,
        workers=engine.placed.mesh.feeds,
        full=progress.full,
    )
    if begins:
        progress.begin_epoch()
    engine.clock.start()
    try:
        while not (yield from _share(engine)):
            pass
    finally:
        feed.data = None
        engine.clock.stop()


def _share(engine: Engine) -> Generator[Any, None, bool]:
    """What this worker gets of what is left of the epoch; says whether the epoch is over then."""
    feed, progress = engine.feed, engine.progress
    calls, assignment = progress.calls, feed.assignment
    ahead = prefetch(feed.batches(engine.placed.feed))
    try:
        for places, batch in ahead:
            feed.drawn += 1
            feed.audit.hand(batch, places)
            yield batch
            if feed.assignment is not assignment or progress.caught_up_at > calls:
                break
    finally:
        ahead.close()
    together(engine, lambda: end_of_data(engine, calls, assignment))
    return progress.calls > calls


def of_own_batches(engine: Engine, batches: Iterable[Any]) -> Iterator[Any]:
    """Batches that are this worker's alone: no other worker could use them in its place."""
    calls = engine.progress.calls
    ahead = prefetch(batches)
    engine.clock.start()
    engine.feed.is_in_own_loop = True
    try:
        yield from ahead
        together(engine, lambda: end_of_data(engine, calls))
    finally:
        engine.feed.is_in_own_loop = False
        ahead.close()
        engine.clock.stop()
