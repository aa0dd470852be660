"""The data set of a session: its ledger, and what this worker has drawn of it.

`drawn` and `used` count rounds of one assignment and begin again with the next; counters of the run are in `Progress`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.data.audit import Audit, tally
from manyhands.data.effect import Effects, Learners
from manyhands.data.ledger import Assignment, Ledger, Ranges, flags, ranges_of
from manyhands.data.loading import empty_like, gather
from manyhands.errors import UsageError

_ASSIGNMENT_SHIFT = 32  # bits for the rounds of one assignment


class FeedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that joins, or a run that resumes, must know of the data."""

    committed: Ranges
    checks: list[dict[str, int]]
    length: int | None = None
    """Of the data set; None where the script has not named it yet, as when a run resumes."""
    epoch: int = 0
    shuffle: bool = True
    batch: int = 1
    round_samples: int = 1
    is_in_loop: bool = False
    is_over: bool = False


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has drawn and not committed when the workers change."""

    rounds: list[Ranges] = []
    used: int = 0  # of those, the ones that are in its steps
    # All places whose effect its replica has; None where all replicas have that of what is committed.
    effect: Ranges | None = None
    epoch: int = 0  # of that effect


class Feed:
    """What this worker draws; `pooled` is whether the batches of all workers in a round make one update."""

    def __init__(self, *, pooled: bool) -> None:
        self.data: Any = None  # whose samples the current steps use
        self.is_in_own_loop = False  # whether they use batches that only this worker has
        self._ledger: Ledger | None = None
        self._safe: Sequence[int] | None = None  # rounds of each worker that the ledger has yet to hear of
        self.round_samples = 1  # that the workers use together in a round
        self.drawn = 0  # rounds of this assignment that this worker has drawn
        self.used = 0  # of those, the ones that are in its steps
        self.audit = Audit()
        self.checks: list[dict[str, int]] = []  # of the epochs that are over: samples used once, twice, never
        self._left = 0  # samples of an epoch that was begun and is not over at the end
        self._pooled = pooled
        self._effects: Effects | None = None
        self._last_data: Any = None
        self._resumed: Ranges = []
        self._used_by: Sequence[int] = ()  # by worker: rounds used at the last exchange
        self._shuffle = True
        self._batch = self._round_samples = 1
        self._worker = 0  # among those that the assignment counts
        self._assignments = 0  # since the workers last changed; all workers make the same
        self._is_over = False  # the epoch of the ledger
        self._is_joining = False  # in the middle of a loop that other workers have begun

    def begin(
        self, data: Any, *, epoch: int, seed: int, batch: int, shuffle: bool, workers: int, full: int
    ) -> bool:
        """The script begins a loop over this data; the batches of `full` workers make a round.

        Returns False where the loop goes on with what another one has left.
        """
        if batch < 1:
            raise UsageError(f"batch_size={batch}: a step needs at least 1 sample per worker")
        is_same = self._last_data is data
        ledger = self.ledger
        self.data = self._last_data = data
        if self._is_joining:
            self._is_joining = False
            return False
        goes_on = bool(ledger and is_same and ledger.epoch == epoch and ledger.length == len(data))
        is_alike = batch == self._batch and batch * full == self._round_samples
        self._batch, self._shuffle = batch, shuffle
        self._round_samples = batch * full
        if goes_on and is_alike:
            # A loop that was left early goes on after what is in steps; no worker need know how far the others are.
            self.drawn = self.used
            return False
        if ledger and goes_on:
            ledger.commit(self._used_by or [self.used] * workers)
        else:
            self.ledger = Ledger(len(data), seed=seed, epoch=epoch, shuffle=shuffle)
            self.ledger.committed = self._resumed
            self.audit = Audit()
            self.audit.begin(self.ledger.times)
        self._resumed, self._is_over = [], False
        self.assign(workers)
        return not goes_on

    def assign(self, workers: int, held: Sequence[Outstanding] = (), worker: int = 0) -> None:
        """Assign what is left to the workers of this generation; each keeps what it has outstanding."""
        own = held[worker] if held else Outstanding()
        self.drawn, self.used = len(own.rounds), own.used
        self._used_by = [one.used for one in held]
        self._assignments = 0 if held else self._assignments + 1
        if self.ledger is None:
            return
        if held:
            self._take_stock(self.ledger, held)
        else:
            self._effects = Effects([self.ledger.times > 0] * workers)
        # Where every update is made from one worker's batch, more workers take more samples in a round.
        round_samples = self._round_samples if self._pooled else self._batch * workers
        self.ledger.assign(
            batch=self._batch,
            round_samples=round_samples,
            workers=workers,
            held=[one.rounds for one in held],
        )
        self._worker, self.round_samples = worker, round_samples

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
        return self.ledger.length if self.ledger else 0

    @property
    def is_last(self) -> bool:
        """Whether the batch drawn last is the last one that this worker gets."""
        return self.assignment is None or self.drawn >= self.assignment.rounds(self._worker)

    @property
    def batch(self) -> int | None:
        """How many samples a worker should have at a time; None outside a loop."""
        return self._batch if self.data is not None else None

    def batches(self, worker: int) -> Iterator[tuple[Tensor, Any]]:
        """This worker's batches, one for every round that is left, with the places of their samples."""
        ledger, data = self._ledger, self.data  # in the thread that loads ahead
        if ledger is None:
            return
        assignment, epoch = ledger.assignment, ledger.epoch
        for number in range(self.drawn, assignment.rounds(worker)):
            places = assignment.share(number, worker)
            if len(places):
                yield places, gather(data, ledger.samples(places), epoch)
            else:
                yield places, empty_like(gather(data, torch.tensor([0]), epoch))

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
        return self._assignments << _ASSIGNMENT_SHIFT | self.drawn

    def settle(self, reached: Sequence[int]) -> None:
        """Where workers do not step together, what the steps of each worker have used counts, as far as it has come. A
        worker that has a later assignment has used all of this one."""
        if self.data is None:
            return
        if self.assignment is not None:
            self.note(self._rounds(self.assignment, reached))
        self.commit()

    def _rounds(self, assignment: Assignment, reached: Sequence[int]) -> list[int]:
        rounds = []
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

    def end_epoch(self, notes: Iterable[Ranges]) -> None:
        """Check the ledger by what the steps of all workers have used."""
        if self.ledger is not None:
            self.checks.append({"epoch": self.ledger.epoch, **tally(self.audit.count(notes))})
        self._is_over = True

    def end(self, notes: Iterable[Ranges]) -> None:
        """The run is over, perhaps in the middle of an epoch."""
        if self.ledger is not None and self.is_under_way:
            found = tally(self.audit.count(notes))
            self._left = found.pop("never")
            self.checks.append({"epoch": self.ledger.epoch, **found, "never": 0})

    @property
    def tally(self) -> dict[str, int]:
        """Samples over all epochs that were used once, more often and never."""
        return {word: sum(check[word] for check in self.checks) for word in ("once", "twice", "never")}

    @property
    def report(self) -> dict[str, Any] | None:
        """For the summary; None if there was no data set whose samples could be counted."""
        return {**self.tally, "left": self._left, "epochs": self.checks} if self.checks else None

    @property
    def is_under_way(self) -> bool:
        """Whether an epoch was begun and has samples left."""
        return self.ledger is not None and not self._is_over

    @property
    def committed(self) -> Ranges:
        """Of the epoch that is under way, or comes next."""
        return self.ledger.committed if self.ledger and not self._is_over else self._resumed

    def record(self) -> FeedRecord | None:
        if self.ledger is None:
            return None
        return FeedRecord(
            length=self.ledger.length,
            epoch=self.ledger.epoch,
            shuffle=self._shuffle,
            batch=self._batch,
            round_samples=self._round_samples,
            committed=self.ledger.committed,
            is_in_loop=self.data is not None,
            is_over=self._is_over,
            checks=self.checks,
        )

    def adopt(self, record: FeedRecord | None, seed: int, *, is_in_loop: bool, keeps: bool) -> None:
        """Go on from a record. `is_in_loop` is whether this worker is in the loop of the worker that made it, and
        `keeps` whether the effect of this worker's own steps is still in its replica."""
        self._is_joining = record is not None and record.is_in_loop and not is_in_loop
        if record is None:
            self.ledger = None
            return
        if record.length is None:
            self.ledger, self._resumed, self.checks = None, record.committed, record.checks
            return
        if self.ledger is None or self.ledger.epoch != record.epoch or not keeps:
            self.audit = Audit()
        self.ledger = Ledger(record.length, seed=seed, epoch=record.epoch, shuffle=record.shuffle)
        self.ledger.committed = record.committed
        self.audit.begin(self.ledger.times)
        self.checks, self._is_over = list(record.checks), record.is_over
        self._shuffle, self._batch, self._round_samples = record.shuffle, record.batch, record.round_samples
