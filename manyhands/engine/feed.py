"""One stream of data of a session: its ledger, and what this worker has drawn of it.

`drawn` and `used` count rounds of one assignment and begin again with the next; counters of the run are in `Progress`.
"""

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.data.audit import Audit
from manyhands.data.effect import Effects, Learners
from manyhands.data.ledger import Assignment, DrawnOrder, Ledger, Ranges, flags, ranges_of
from manyhands.data.streams import Stream
from manyhands.data.structure import emptied, samples_of
from manyhands.engine.feed_pace import FeedPace
from manyhands.engine.feed_record import UNKNOWN, FeedRecord, Outstanding, ledger_of

_ASSIGNMENT_SHIFT = 32  # bits for the rounds of one assignment


class Feed:
    """What this worker draws; `pooled` is whether the batches of all workers in a round make one update.

    `assignments` is how many the stream that had its slot before has had.
    """

    def __init__(self, *, pooled: bool, assignments: int = 0) -> None:
        self.stream: Stream | None = None  # None before the script has opened it
        self.is_in_loop = False
        self.is_main = True  # whether its loop is the script's own, not one inside of another
        self.inner_has_ended = False  # a loop inside of its loop, since it handed out a batch
        self.left_at: int | None = None  # rounds that the loop around its loop had drawn when it was left
        self.is_abandoned = False  # the next loop begins anew, whatever this one has left
        self.ends = 0  # how many of its epochs are over
        self._ledger: Ledger | None = None
        self._safe: Sequence[int] | None = None  # rounds of each worker that the ledger has yet to hear of
        self.round_samples = 1  # that the workers use together in a round
        self.drawn = 0  # rounds of this assignment that this worker has drawn
        self.waiting = 0  # of those, the last ones, which the script has and has not given to a step
        self.passed = (
            0  # of those, the first ones: steps of other streams were made since the script got them
        )
        self.used = 0  # of the drawn ones, those that are in steps
        self.audit = Audit()
        self.pace = FeedPace()
        self._pooled = pooled
        self._effects: Effects | None = None
        self._used_by: Sequence[int] = ()  # by worker: rounds used at the last exchange
        self._shuffle = True
        self._batch = self._round_samples = 1
        self._is_dealt = False
        self._worker = 0  # among those that the assignment counts
        self._assignments = assignments  # since the workers last changed; all workers make the same
        self.is_over = False  # the epoch of the ledger
        self.is_joining = False  # in the middle of a loop that other workers have begun

    def begin(
        self,
        stream: Stream,
        *,
        epoch: int,
        seed: int,
        workers: int,
        full: int,
        drawn: DrawnOrder | None = None,
        saved: FeedRecord | None = None,
    ) -> bool:
        """The script begins a loop over this stream; the batches of `full` workers make a round. What a checkpoint has
        `saved` of the epoch holds, and so does the order that a sampler has `drawn`.

        Returns False where the loop goes on with what another one has left.
        """
        goes_on, ledger = self.goes_on, self.ledger
        self.stream = stream
        if self.is_joining:
            self.is_joining = False
            return False
        is_alike = stream.batch == self._batch and stream.batch * full == self._round_samples
        self._batch, self._shuffle, self._is_dealt = stream.batch, stream.shuffle, stream.is_dealt
        self._round_samples = stream.batch * full
        if goes_on and is_alike:
            # A loop that was left early goes on after what is in steps; no worker need know how far the others are.
            self.drawn, self.waiting = self.used, 0
            return False
        if ledger and goes_on:
            ledger.commit(self._used_by or [self.used] * workers)
        else:
            whole = saved is None or saved.length == UNKNOWN
            made = FeedRecord(
                committed=saved.committed if saved else [],
                length=drawn.length if drawn is not None else stream.length,
                total=stream.total,
                epoch=epoch,
                shuffle=stream.shuffle,
                is_main=self.is_main,
            )
            self.ledger = ledger_of(made if whole or saved is None else saved, seed, drawn)
            self.audit = Audit()
            self.audit.begin(self.ledger.times)
            self.is_abandoned = saved is not None and saved.is_abandoned
        self.is_over = False
        self.assign(workers)
        self.pace.begin()
        return not goes_on

    @property
    def goes_on(self) -> bool:
        """Whether the next loop goes on with samples that another one has left."""
        return self._ledger is not None and not self.is_over

    @property
    def must_end(self) -> bool:
        """Whether an epoch that is not over has to end before the next loop: it was left for good, or the steps of this
        worker have used all that it gets."""
        if not self.goes_on or self.assignment is None or self.is_joining:
            return False
        return self.is_abandoned or self.used >= self.assignment.rounds(self._worker)

    def give_up(self) -> None:
        """What no step of this worker has used of the epoch it does not want."""
        self.drawn, self.waiting = self.used, 0

    def assign(
        self, workers: int, held: Sequence[Outstanding] = (), worker: int = 0, takers: Sequence[int] = ()
    ) -> None:
        """Assign what is left to the workers of this generation; each keeps what it has outstanding. If not all can
        take more, `takers` can."""
        own = held[worker] if held else Outstanding()
        self.drawn, self.used = len(own.rounds), own.used
        self.waiting = min(self.waiting, self.drawn - self.used)
        self._used_by = [one.used for one in held]
        self._assignments = 0 if held else self._assignments + 1
        if self.ledger is None:
            return
        if held:
            self._take_stock(self.ledger, held)
        else:
            self._effects = Effects([self.ledger.times > 0] * workers)
        # Where every update is made from one worker's batch, more workers take more samples in a round.
        is_whole = self._pooled and not self._is_dealt and not takers
        round_samples = self._round_samples if is_whole else self._batch * (len(takers) or workers)
        self.ledger.assign(
            batch=self._batch,
            round_samples=round_samples,
            workers=workers,
            held=[one.rounds for one in held],
            takers=takers,
        )
        self._worker = worker if held else self._worker
        self.round_samples = round_samples
        self.pace.assign(
            self.ledger.assignment,
            [one.used for one in held] or [0] * workers,
            before=int(self.ledger.times.count_nonzero()),
            full=self._round_samples,
        )

    def _take_stock(self, ledger: Ledger, held: Sequence[Outstanding]) -> None:
        """Workers have come or gone: what the replicas of this generation have counts, and nothing else does."""
        told = [one.effect if one.epoch == ledger.epoch else None for one in held]
        known = [flags(effect, ledger.length) for effect in told if effect is not None]
        if not known:
            self.audit.begin(ledger.times)  # no worker can ask those that are gone
            self._effects = Effects([ledger.times > 0] * len(held))
            return
        # A worker that is new has taken over the first one's replica.
        rest = iter(known)
        self._effects = Effects([known[0] if effect is None else next(rest) for effect in told])
        counted = torch.stack(known).any(0)
        for one in held:
            for ranges in one.rounds:
                counted &= ~flags(ranges, ledger.length)  # it counts when its worker has met another one
        self.audit.begin(torch.where(counted, ledger.times.clamp(min=1), 0))
        ledger.correct(counted)

    @property
    def assignment(self) -> Assignment | None:
        return self._ledger.assignment if self._ledger else None

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return self.ledger.size if self.ledger else 0

    @property
    def is_last(self) -> bool:
        """Whether the batch drawn last is the last one that this worker gets."""
        return self.assignment is None or self.drawn >= self.assignment.rounds(self._worker)

    @property
    def rounds_left(self) -> int:
        """How many batches this worker still gets of an epoch that is not over."""
        return self.assignment.rounds(self._worker) - self.drawn if self.assignment else 0

    @property
    def batch(self) -> int | None:
        """How many samples a worker should have at a time; None outside a loop, and where a script makes its own
        batches."""
        return self._batch if self.is_in_loop and not self._is_dealt else None

    def batches(self, worker: int) -> Generator[tuple[Tensor, Any], None, None]:
        """This worker's batches, one for every round that is left, with the places of their samples."""
        ledger, stream = self._ledger, self.stream  # in the thread that loads ahead
        if ledger is None or stream is None:
            return
        self._worker = worker
        assignment, epoch = ledger.assignment, ledger.epoch
        ahead: deque[Tensor] = deque()

        def shares() -> Iterator[Tensor]:
            for number in range(self.drawn, assignment.rounds(worker)):
                places = assignment.share(number, worker)
                ahead.append(places)
                yield ledger.samples(places if len(places) else torch.tensor([0]))

        for batch in stream.load(shares(), epoch):
            places = ahead.popleft()
            if len(places):
                yield places, batch
            elif (nothing := emptied(batch)) is not None:
                yield places, nothing

    def hand(self, batch: Any, places: Tensor) -> None:
        """The script gets a batch, and has made steps with those before it, if they were to be used at all."""
        if self.passed:
            self.settle_passed()
        self.inner_has_ended = False
        self.drawn += 1
        if (
            batch is None
        ):  # the loader's collate function has left all of its samples out: no step will use it
            return
        self.waiting += 1
        samples = len(places)
        if self._is_dealt and samples and self._ledger is not None:
            samples = samples_of(batch, len(self._ledger.samples(places)))
        self.audit.hand(batch, places, samples)

    def stop(self) -> None:
        """The script leaves the loop."""
        self.is_in_loop = False
        if self.passed:
            self.settle_passed()
            self.used = self.drawn - self.waiting

    def settle_passed(self) -> None:
        """Steps were made while the script had these batches, and it wants others now: they count as used."""
        self.audit.used += self.audit.use_next(self.passed)
        self.waiting = max(0, self.waiting - self.passed)
        self.passed = 0

    @property
    def ledger(self) -> Ledger | None:
        """With everything that is committed: steps leave their commits in `_safe` until the ledger is asked for."""
        if self._safe is not None and self._ledger and self._effects:
            self._effects.meet(self._safe)
            self._ledger.commit(self._safe)
        self._safe = None
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger | None) -> None:
        self._ledger, self._safe = ledger, None

    def note_step(self, drawn: Sequence[int], is_safe: bool, groups: Learners | None, *, late: bool) -> None:
        """All workers have made a step. If it `is_safe`, so is what they have used; where gradients come `late`, what
        they had used before it."""
        if is_safe and late:
            self.commit(groups)
        self._used_by = drawn
        if is_safe and not late:
            self.commit(groups)

    def note(self, used_by: Sequence[int]) -> None:
        """How many rounds each worker has used."""
        self._used_by = used_by

    @property
    def progress(self) -> int:
        """How far this worker has come, for workers that may have another assignment; it only grows."""
        return self._assignments << _ASSIGNMENT_SHIFT | self.used

    @property
    def prospect(self) -> int:
        """As above, once the step under way is made."""
        return self._assignments << _ASSIGNMENT_SHIFT | self.drawn - self.waiting

    def settle(self, reached: Sequence[int]) -> None:
        """Where workers do not step together, what the steps of each worker have used counts, as far as it has come. A
        worker that has a later assignment has used all of this one."""
        if not self.is_under_way:
            return
        if self.assignment is not None:
            self.note(self.rounds_at(reached))
        self.commit()

    def rounds_at(self, reached: Sequence[int]) -> list[int]:
        """By worker the rounds of this assignment that it had used when it had come so far."""
        rounds: list[int] = []
        assignment = self.assignment
        if assignment is None:
            return [0 for _ in reached]
        for worker, value in enumerate(reached):
            ahead = (value >> _ASSIGNMENT_SHIFT) - self._assignments
            used = assignment.rounds(worker) if ahead > 0 else value & ((1 << _ASSIGNMENT_SHIFT) - 1)
            rounds.append(0 if ahead < 0 else used)
        return rounds

    def commit(self, groups: Learners | None = None) -> None:
        """What all workers had used at the last exchange is safe; with `groups`, what those in them had."""
        if not self._used_by:
            return
        if groups is None:
            self._safe = self._used_by
            return
        ledger = self.ledger
        if ledger is None or self._effects is None:
            return
        self._effects.meet(self._used_by, groups)
        met = set(itertools.chain.from_iterable(groups))
        ledger.commit([used if worker in met else 0 for worker, used in enumerate(self._used_by)])

    def outstanding(self, worker: int) -> Outstanding:
        if self.ledger is None or self._effects is None:
            return Outstanding()
        used = max(0, self.used - self.ledger.settled(worker))
        effect = None
        if self._effects.differ:
            found = self._effects.of(worker, self.used, self.ledger.assignment)
            effect = ranges_of(found.nonzero().flatten())
        rounds = self.ledger.outstanding(worker, self.drawn)
        return Outstanding(rounds=rounds, used=used, effect=effect, epoch=self.ledger.epoch)

    @property
    def is_complete(self) -> bool:
        """After the last commit: whether every sample of the epoch was used; otherwise the rest is assigned again."""
        return self.ledger is not None and not self.ledger.tally()["never"]

    def end_epoch(self, notes: Iterable[Ranges]) -> dict[str, int]:
        """Check the ledger by what the steps of all workers have used."""
        self.is_over = True
        self.ends += 1
        return self.check(notes)

    def check(self, notes: Iterable[Ranges]) -> dict[str, int]:
        """Samples that the steps of all workers have used once, more often and never."""
        if self.ledger is None:
            return {}
        inner = {} if self.is_main else {"inner": 1}
        return {"epoch": self.ledger.epoch, **self.ledger.count(self.audit.count(notes)), **inner}

    @property
    def is_under_way(self) -> bool:
        """Whether an epoch was begun and has samples left."""
        return self.ledger is not None and not self.is_over

    @property
    def assignments(self) -> int:
        return self._assignments

    def record(self) -> FeedRecord | None:
        if self.ledger is None:
            return None
        return FeedRecord(
            length=self.ledger.length,
            total=self.ledger.total,
            epoch=self.ledger.epoch,
            drawn=self.ledger.drawn.encode() if self.ledger.drawn is not None else "",
            shuffle=self._shuffle,
            batch=self._batch,
            round_samples=self._round_samples,
            is_dealt=self._is_dealt,
            committed=self.ledger.committed,
            is_in_loop=self.is_in_loop,
            is_over=self.is_over,
            is_main=self.is_main,
            is_abandoned=self.is_abandoned,
            pace=(self.pace.counted, self.pace.owed),
        )

    def adopt(self, record: FeedRecord | None, seed: int, *, is_in_loop: bool, keeps: bool) -> None:
        """Go on from a record. `is_in_loop` is whether this worker is in the loop of the worker that made it, and
        `keeps` whether the effect of this worker's own steps is still in its replica."""
        self.is_joining = record is not None and record.is_in_loop and not is_in_loop
        if record is None:
            self.ledger = None
            return
        if self.ledger is None or self.ledger.epoch != record.epoch or not keeps:
            self.audit = Audit()
        self.ledger = ledger_of(record, seed)
        self.audit.begin(self.ledger.times)
        self.is_over, self.is_main, self._is_dealt = record.is_over, record.is_main, record.is_dealt
        self.is_abandoned = record.is_abandoned
        self.pace.counted, self.pace.owed = record.pace
        self._shuffle, self._batch, self._round_samples = record.shuffle, record.batch, record.round_samples
