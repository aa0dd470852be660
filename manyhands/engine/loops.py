"""The loops of a script over its data: what this worker gets of an epoch, loaded ahead in the background."""

import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from manyhands.data.divided_streams import DividedLoader, is_stream
from manyhands.data.ledger import rounds
from manyhands.data.loader_stream import LoaderStream, is_map_style
from manyhands.data.loading import prefetch, waited_for
from manyhands.data.streams import DataSetStream, Stream
from manyhands.engine.arguments import admit_data
from manyhands.engine.engine import Engine
from manyhands.engine.feed import Feed
from manyhands.engine.pause import LoopState, agree_on_order, end_of_data, end_of_own_data
from manyhands.engine.step import together
from manyhands.errors import UsageError


class Batches:
    """This worker's share of an epoch. Every `for` loop over it is an epoch, or goes on with one that was left."""

    def __init__(self, engine: Engine, source: Stream | Iterable[Any]) -> None:
        self._engine = engine
        self._source = source
        self._running: Any = None  # a weak reference: a loop that is left must end at once

    def __iter__(self) -> Iterator[Any]:
        loop = _loop(self._engine, self._source)
        self._running = weakref.ref(loop)
        return loop

    def __len__(self) -> int:
        """How many batches this worker gets from the next loop; a TypeError where that is not known before."""
        if _is_stream(self._source):
            return _length(self._engine, self._source)
        return len(self._source)  # type: ignore[arg-type]

    def close(self) -> None:
        """Leave the loop, where a variable still holds it."""
        loop = self._running and self._running()
        if loop is not None:
            loop.close()


def batches(engine: Engine, data: Any, *, batch_size: int | None, shuffle: bool) -> Batches:
    """What `session.batches` gives for this data."""
    if isinstance(data, DataLoader) and batch_size is not None:
        raise UsageError(
            "session.batches(loader) takes the batch size from the loader, which is that of one worker: leave "
            "batch_size= out"
        )
    if is_stream(data) and batch_size is not None:
        data = DataLoader(data, batch_size=batch_size)
    if isinstance(data, DataLoader) and is_stream(data.dataset):
        return Batches(engine, _divided(engine, data))
    if is_map_style(data):
        return Batches(engine, _of_loader(engine, data))
    if batch_size is not None or isinstance(data, Mapping):
        admit_data(data, "session.batches(data, batch_size=…)")
    if batch_size is not None:
        return Batches(engine, DataSetStream(data, batch_size=batch_size, shuffle=shuffle))
    if hasattr(data, "__getitem__") and not isinstance(data, (list, tuple)):
        raise UsageError("session.batches(dataset) needs batch_size=… (samples per worker and step)")
    return Batches(engine, data)


def _divided(engine: Engine, loader: Any) -> DividedLoader:
    made = DividedLoader(loader, lambda: (engine.placed.feed, engine.placed.mesh.feeds), engine.progress.seed)
    engine.say_once(made.note)
    return made


def _of_loader(engine: Engine, loader: Any) -> LoaderStream:
    """The loader as it was when it was looped over before: its processes may still be there."""
    for feed in engine.feeds.slots:
        if isinstance(feed.stream, LoaderStream) and feed.stream.data is loader and not feed.is_in_loop:
            return feed.stream
    stream = LoaderStream(loader, full=engine.progress.full, feed=engine.placed.feed)
    engine.say_once(stream.note)
    return stream


def _is_stream(source: Any) -> bool:
    return hasattr(source, "is_dealt")


def _length(engine: Engine, stream: Any) -> int:
    feed = engine.feeds.known(stream)
    if feed is not None and feed.goes_on and not feed.must_end:
        return feed.rounds_left
    if stream.length < 0:
        raise TypeError(f"{type(stream.data).__name__} has a sampler without a length")
    per_round = engine.placed.mesh.feeds if stream.is_dealt else stream.batch * engine.progress.full
    return rounds(stream.length, per_round)


def _loop(engine: Engine, source: Any) -> Generator[Any, None, None]:
    progress = engine.progress
    if progress.calls < progress.caught_up_at:  # the other workers had ended this loop before this one came
        progress.calls += engine.feeds.outermost is None
    elif _is_stream(source):
        yield from _of_stream(engine, source)
    else:
        yield from _of_own_batches(engine, source)


def _of_stream(engine: Engine, stream: Stream) -> Iterator[Any]:
    """This worker's share of the samples of a stream."""
    feeds = engine.feeds
    feed = feeds.feed_for(stream)
    feeds.enter(feed)
    # Then this is the loop of the other workers, also where none of its samples is left.
    joins = feed.is_joining
    try:
        _begin(engine, feed, stream)
        if feed.must_end and not joins:  # the last loop was left for good, or after its last batch
            _end(engine, feed)
            _begin(engine, feed, stream)
        engine.clock.start()
        while not (yield from _share(engine, feed, stream)):
            pass
    finally:
        feeds.leave(feed)
        if not feeds.is_in_loop:
            engine.clock.stop()


def _begin(engine: Engine, feed: Feed, stream: Stream) -> None:
    progress, feeds = engine.progress, engine.feeds
    saved = feeds.saved_of(stream, is_main=feeds.outermost is feed)
    drawn = None
    if stream.is_drawn and not feed.goes_on and not (saved and saved.drawn):
        drawn = together(engine, lambda: agree_on_order(engine, stream))
    begins = feeds.begin(
        feed,
        stream,
        drawn=drawn,
        epoch=progress.epoch,
        seed=progress.seed,
        workers=engine.placed.mesh.feeds,
        full=progress.full,
    )
    if begins:
        progress.begin_epoch()


def _share(engine: Engine, feed: Feed, stream: Stream) -> Generator[Any, None, bool]:
    """What this worker gets of what is left of the epoch; says whether the epoch is over then."""
    progress = engine.progress
    began = LoopState(calls=progress.calls, ends=feed.ends, assignment=feed.assignment)
    mine = feed.batches(engine.placed.feed)
    ahead = prefetch(mine) if stream.in_background else mine
    try:
        for places, batch in waited_for(ahead):
            feed.hand(batch, places)
            yield batch
            if _is_behind(engine, feed, began):
                break
    finally:
        ahead.close()
    if not engine.has_entered:
        return True  # no step was made
    together(engine, lambda: end_of_data(engine, feed, began))
    return feed.ends > began.ends or progress.calls > began.calls or progress.caught_up_at > began.calls


def _end(engine: Engine, feed: Feed) -> None:
    """The epoch that a loop before has left is over."""
    feed.give_up()
    began = LoopState(calls=engine.progress.calls, ends=feed.ends, assignment=feed.assignment)
    together(engine, lambda: end_of_data(engine, feed, began))


def _is_behind(engine: Engine, feed: Feed, began: LoopState) -> bool:
    """Whether what is left of the loop is assigned anew, or over, since workers have come or gone."""
    return (
        feed.assignment is not began.assignment
        or feed.ends > began.ends
        or engine.progress.caught_up_at > began.calls
    )


def _of_own_batches(engine: Engine, source: Iterable[Any]) -> Iterator[Any]:
    """Batches that are this worker's alone: no other worker could use them in its place."""
    feeds, loop, calls = engine.feeds, object(), engine.progress.calls
    # What draws random numbers in this process draws them where plain PyTorch would.
    ahead = iter(source) if isinstance(source, DividedLoader) else prefetch(source)
    engine.clock.start()
    feeds.enter(loop)
    feeds.own_loops += 1
    try:
        yield from waited_for(ahead)
        if engine.has_entered:  # else no step was made
            together(engine, lambda: end_of_own_data(engine, loop, calls))
    finally:
        feeds.own_loops -= 1
        feeds.leave(loop)
        if isinstance(ahead, Generator):
            ahead.close()
        if not feeds.is_in_loop:
            engine.clock.stop()
