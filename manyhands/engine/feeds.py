"""All streams of data of a session: a feed for each, in a slot of its own, which is the same on all workers.

Most scripts have one stream. Several are open at once where a script zips them, or has a loop inside of another; the
outermost loop is the script's own: its ends are the epochs that the session counts.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from manyhands.data.effect import Learners
from manyhands.data.ledger import DrawnOrder, Ranges
from manyhands.data.streams import Stream
from manyhands.engine.feed import Feed
from manyhands.engine.feed_record import UNKNOWN, FeedRecord, Outstanding
from manyhands.errors import UsageError

MOST = 8  # streams at a time: every handshake has a number for each


class FeedsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that joins, or a run that resumes, must know of the data."""

    slots: list[FeedRecord | None] = []
    checks: list[dict[str, int]] = []
    turns: int = 0
    inner_epochs: int = 0
    resumed: list[FeedRecord] = []


MOST_CHECKS = 1000
"""Of epochs that are over: a run of a week may have a million, and each is in every checkpoint and in the summary."""


def add_check(checks: list[dict[str, int]], found: dict[str, int]) -> None:
    """Add that of one more epoch; where there are too many, the oldest become one, which says of how many `epochs`."""
    checks.append(found)
    if len(checks) > MOST_CHECKS:
        first, second = checks[:2]
        sums = {word: first[word] + second[word] for word in _COUNTED}
        epochs = first.get("epochs", 1) + second.get("epochs", 1)
        checks[:2] = [{"epoch": second["epoch"], "epochs": epochs, **sums}]


_COUNTED = ("once", "twice", "never")


class Feeds:
    """What this worker draws; `pooled` is whether the batches of all workers in a round make one update."""

    def __init__(self, *, pooled: bool) -> None:
        self.slots = [Feed(pooled=pooled)]
        self.open: list[Feed] = []  # in whose loops the script is
        self.own_loops = 0  # loops over batches that only this worker has
        self.outermost: object = None  # the loop that was begun outside of all others
        self.last = self.slots[0]  # of the loop that was begun last outside of others
        self.checks: list[dict[str, int]] = []  # of the epochs that are over: samples used once, twice, never
        self.turns = 0  # how many epochs were begun and ended; all workers count the same
        self._inner_epochs = 0  # of loops inside of others
        self._resumed: list[
            FeedRecord
        ] = []  # what a checkpoint says of streams that the script has not opened yet
        self._left = 0  # samples of epochs that were begun and are not over at the end
        self._pooled = pooled

    # The loops of the script

    @property
    def is_in_loop(self) -> bool:
        return bool(self.open or self.own_loops)

    def enter(self, loop: object) -> None:
        """The script begins a loop."""
        if self.outermost is None:
            self.outermost = loop
        if isinstance(loop, Feed):
            loop.is_in_loop = True
            self.open.append(loop)

    def leave(self, loop: object) -> None:
        """The script leaves a loop, perhaps in the middle of the epoch: the next one goes on there. An inner loop
        begins anew, unless the outer one was left with it; so do all when they were zipped and one has ended."""
        outer = self.outermost if isinstance(self.outermost, Feed) else None
        if self.outermost is loop:
            self.outermost = None
        if not isinstance(loop, Feed):
            return
        loop.stop()
        self.open.remove(loop)
        if loop.is_main:
            loop.is_abandoned = loop.is_under_way and loop.inner_has_ended
            if loop.is_under_way and not loop.is_abandoned:
                for feed in self.slots:
                    feed.is_abandoned &= feed.left_at != loop.drawn
        elif loop.is_under_way:
            loop.is_abandoned = outer is not None or not self.last.is_under_way or self.last.is_abandoned
            loop.left_at = outer.drawn if outer else None

    def feed_for(self, stream: Stream) -> Feed:
        """The feed of a stream that the script wants to loop over: the one that it had before, or a new one."""
        idle = [feed for feed in self.slots if not feed.is_in_loop]
        if known := self.known(stream):
            return known
        for feed in idle:  # opened by other workers already
            is_open = feed.stream is None and feed.is_under_way and feed.is_main == (self.outermost is None)
            if is_open and _fits(stream, feed.record()):
                return feed
        return self._make_room(idle)

    def known(self, stream: Stream) -> Feed | None:
        """The feed of a stream that the script has opened before, and that it is not in a loop over."""
        return next((one for one in self.slots if not one.is_in_loop and _is_same(stream, one)), None)

    def _make_room(self, idle: Sequence[Feed]) -> Feed:
        over = next((feed for feed in idle if not feed.is_under_way), None)
        if over is None and len(self.slots) < MOST:
            self.slots.append(Feed(pooled=self._pooled))
            return self.slots[-1]
        if not idle:
            raise UsageError(
                f"{MOST} loops over session.batches(…) are open at once, and a session has at most {MOST}; end one "
                "of them before the next begins"
            )
        old = over or idle[0]
        feed = Feed(pooled=self._pooled, assignments=old.assignments)
        self.slots[self.slots.index(old)] = feed
        return feed

    def begin(
        self,
        feed: Feed,
        stream: Stream,
        *,
        epoch: int,
        seed: int,
        workers: int,
        full: int,
        drawn: DrawnOrder | None = None,
    ) -> bool:
        """Begin a loop, or go on with one that was left; returns whether an epoch of the script's own begins."""
        saved = None
        if not feed.goes_on:
            feed.is_main = self.outermost in (None, feed)
            saved = self.saved_of(stream, is_main=feed.is_main)
            if saved:
                self._resumed.remove(saved)
            if not feed.is_main:
                epoch, self._inner_epochs = self._inner_epochs, self._inner_epochs + 1
            self.turns += 1
        begins = feed.begin(
            stream, epoch=epoch, seed=seed, workers=workers, full=full, drawn=drawn, saved=saved
        )
        if feed.is_main:
            self.last = feed
        return begins and feed.is_main

    def saved_of(self, stream: Stream, *, is_main: bool) -> FeedRecord | None:
        """What a checkpoint says of a stream that the script opens for the first time since it resumed."""
        return next((one for one in self._resumed if one.is_main == is_main and _fits(stream, one)), None)

    # The steps

    @property
    def limit(self) -> int | None:
        """How many samples a worker should have at a time."""
        batches = [feed.batch for feed in self.open]
        return None if None in batches else max(batches, default=None)  # type: ignore[type-var]

    def take(self, batches: Sequence[Any], total: int) -> list[tuple[Feed, Ranges]]:
        """The step to come uses these batches; returns where their samples lie in the order of each epoch."""
        self.admit(batches)
        if len(self.open) == 1:
            feed = self.open[0]
            feed.waiting = 0  # what the script has got and has not used by its next step it does not want
            return [(feed, feed.audit.find(batches, total))]
        found = [(feed, *feed.audit.recognise(batches)) for feed in self.open]
        used = [(feed, places) for feed, places, _ in found if places]
        if not used:  # the script has made something else of them
            used = [(feed, feed.audit.use_next(feed.waiting)) for feed in self.open]
            for feed in self.open:
                feed.waiting = feed.passed = 0
        for feed, places, waiting in found:
            if places and waiting is not None:
                feed.waiting, feed.passed = min(feed.waiting, waiting), 0
            elif not places:
                feed.passed = feed.waiting
        return used

    def admit(self, batches: Sequence[Any]) -> None:
        """Refuse a batch that was taken apart."""
        if any(feed.audit.are_of_one(batches) for feed in self.open):
            raise UsageError(
                f"session.step(a, b) takes several batches, and was given the {len(batches)} tensors of one batch, "
                "each of which would be a batch of its own; say session.step(batch) or session.step((inputs, targets))"
            )

    def turn(self) -> tuple[list[tuple[Feed, Ranges]], int] | None:
        """What the script was given last, for something that it has made of it itself, and the number of samples; None
        where it is in no loop, or in several."""
        if len(self.open) != 1:
            return None
        feed = self.open[0]
        feed.waiting = 0
        turn = feed.audit.turn()
        return None if turn is None else ([(feed, turn[0])], turn[1])

    def note_step(
        self, drawn: Sequence[Sequence[int]], is_safe: bool, groups: Learners | None, *, late: bool
    ) -> None:
        """All workers have made a step; by slot, the rounds that each has used."""
        for feed, rounds in zip(self.slots, drawn, strict=True):
            feed.note_step(rounds, is_safe, groups, late=late)

    def note_used(self) -> None:
        """What this worker has given to steps is in them."""
        for feed in self.open:
            feed.used = feed.drawn - feed.waiting

    def drawn(self, feed: Feed, *, steps: bool, ends: Feed | None) -> int:
        """The rounds of a stream that count as used when this worker comes for a step, or for the end of a loop: what
        a script has not used by then it does not want."""
        if ends is feed:
            return feed.drawn
        return feed.drawn - feed.waiting if steps and feed.is_in_loop else feed.used

    def under_way(self) -> list[Feed]:
        return [feed for feed in self.slots if feed.is_under_way]

    def commit(self, groups: Learners | None = None) -> None:
        """What all workers have used is safe; with `groups`, what those in them have."""
        for feed in self.slots:
            feed.commit(groups)

    def settle(self, reached: Sequence[Sequence[int]]) -> None:
        """By worker, how far it has come in each slot."""
        for slot, feed in enumerate(self.slots):
            feed.settle([one[slot] if slot < len(one) else 0 for one in reached])

    @property
    def progress(self) -> tuple[int, ...]:
        return tuple([feed.progress for feed in self.slots])

    @property
    def prospect(self) -> tuple[int, ...]:
        return tuple([feed.prospect for feed in self.slots])

    # The ends

    def end_epoch(self, feed: Feed, notes: Iterable[Ranges]) -> None:
        is_whole = not feed.is_abandoned
        found = feed.end_epoch(notes)
        self.turns += 1
        if isinstance(self.outermost, Feed):
            self.outermost.inner_has_ended = True
        if is_whole:
            add_check(self.checks, found)
        else:
            self._note_left(found)

    def end(self, feed: Feed, notes: Iterable[Ranges]) -> None:
        """The run is over in the middle of an epoch."""
        self._note_left(feed.check(notes))

    def _note_left(self, found: dict[str, int]) -> None:
        self._left += found["never"]
        add_check(self.checks, {**found, "never": 0})

    @property
    def tally(self) -> dict[str, int]:
        """Samples over all epochs that were used once, more often and never."""
        return {word: sum(check[word] for check in self.checks) for word in _COUNTED}

    @property
    def report(self) -> dict[str, Any] | None:
        """For the summary; None if there was no data set whose samples could be counted."""
        return {**self.tally, "left": self._left, "epochs": self.checks} if self.checks else None

    # Workers come and go

    def assign(self, workers: int, held: Sequence[Sequence[Outstanding]], worker: int) -> None:
        """A generation begins, in which each worker keeps what it holds of each stream."""
        for slot, feed in enumerate(self.slots):
            feed.assign(workers, [one[slot] if slot < len(one) else Outstanding() for one in held], worker)

    def outstanding(self, worker: int) -> list[Outstanding]:
        return [feed.outstanding(worker) for feed in self.slots]

    def record(self) -> FeedsRecord:
        return FeedsRecord(
            slots=[feed.record() for feed in self.slots],
            checks=self.checks,
            turns=self.turns,
            inner_epochs=self._inner_epochs,
            resumed=self._resumed,
        )

    def to_record(self) -> dict[str, Any]:
        """For a checkpoint: the epochs that are under way, and those that the checkpoint before has left."""
        records = [record for feed in self.under_way() if (record := feed.record())] + self._resumed
        main = next((one.committed for one in records if one.is_main), [])
        return {
            "committed": [list(one) for one in main],
            "streams": msgspec.json.decode(msgspec.json.encode(records)),
            "inner_epochs": self._inner_epochs,
            "checks": self.checks,
        }

    def adopt(self, record: FeedsRecord, seed: int, *, follows: bool, keeps: bool) -> None:
        """Go on from a record. `follows` is whether this worker's script is in the loops of the worker that made it, as
        far as it is in a loop at all, and `keeps` whether the effect of its own steps is still in its replica."""
        while len(self.slots) < len(record.slots):
            self.slots.append(Feed(pooled=self._pooled))
        for feed, one in itertools.zip_longest(self.slots, record.slots):
            feed.adopt(one, seed, is_in_loop=feed.is_in_loop and follows, keeps=keeps)
        self.last = next((feed for feed in self.slots if feed.is_main and feed.is_under_way), self.slots[0])
        self._adopt_counts(record)

    def adopt_ahead(self, record: FeedsRecord, seed: int) -> None:
        """Another worker has begun or ended loops inside of those of this one."""
        if record.turns <= self.turns:
            return
        while len(self.slots) < len(record.slots):
            self.slots.append(Feed(pooled=self._pooled))
        for feed, one in zip(self.slots, record.slots, strict=False):
            ledger = feed.ledger
            mine = (ledger.epoch, feed.is_main) if ledger is not None else None
            theirs = (one.epoch, one.is_main) if one is not None else None
            if mine is not None and mine == theirs:
                if one is not None and one.is_over and not feed.is_over:
                    feed.is_over = True
                    feed.ends += 1
            else:
                feed.adopt(one, seed, is_in_loop=False, keeps=True)
        self._adopt_counts(record)

    def _adopt_counts(self, record: FeedsRecord) -> None:
        self.checks, self.turns = list(record.checks), record.turns
        self._inner_epochs, self._resumed = record.inner_epochs, list(record.resumed)


def _is_same(stream: Stream, feed: Feed) -> bool:
    """Whether a feed is of this stream."""
    known = feed.stream
    if known is None or known.data is not stream.data:
        return False
    return not feed.goes_on or (known.is_dealt == stream.is_dealt and known.length == stream.length)


def _fits(stream: Stream, record: FeedRecord | None) -> bool:
    """Whether a record may be that of this stream, which another process had open."""
    if record is None or record.is_dealt != stream.is_dealt or record.shuffle != stream.shuffle:
        return False
    return bool(record.drawn) or record.total in (stream.total, UNKNOWN)


def from_record(record: Mapping[str, Any]) -> FeedsRecord:
    """What the record of a checkpoint says of the data."""
    committed = [(first, last) for first, last in record["committed"]]
    if "streams" in record:
        resumed = msgspec.convert(record["streams"], list[FeedRecord])
    else:  # written when a session had one stream
        unknown = FeedRecord(committed=committed, length=UNKNOWN, total=UNKNOWN, epoch=record["epoch"])
        resumed = [unknown] if committed else []
    return FeedsRecord(checks=record["checks"], inner_epochs=record.get("inner_epochs", 0), resumed=resumed)
