"""The data set of a session: its ledger, and what this worker has drawn of it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from manyhands.data.ledger import Dealing, Ledger, Ranges
from manyhands.data.loading import empty_like, gather
from manyhands.errors import UsageError


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that comes later must know of the data."""

    length: int
    epoch: int
    shuffle: bool
    batch: int
    round_samples: int
    committed: Ranges
    is_in_loop: bool
    tally: dict[str, int]


class Feed:
    """What the workers draw; `pooled` is whether all their batches of a round make one update."""

    def __init__(self, *, pooled: bool) -> None:
        self.data: Any = None  # whose samples the current steps use
        self.ledger: Ledger | None = None
        self.drawn = 0  # rounds of this dealing that this worker has drawn
        self.tally: Counter[str] = Counter()  # of the epochs that are over
        self._pooled = pooled
        self._last_data: Any = None
        self._resumed: Ranges = []
        self._everyone: Sequence[int] = ()  # rounds that each worker had drawn at the last meeting
        self._shuffle = True
        self._batch = self._round_samples = 1
        self._is_joining = False  # in the middle of a loop that others have begun

    def begin(
        self, data: Any, *, epoch: int, seed: int, batch: int, shuffle: bool, workers: int, full: int
    ) -> bool:
        """A loop over this data; `full` is the number of workers whose batches make a round.

        Says whether it begins here, and does not go on with what was left of another.
        """
        if batch < 1:
            raise UsageError(f"batch_size={batch}: a step needs at least 1 sample per worker")
        is_same = self._last_data is data
        ledger = self.ledger
        self.data = self._last_data = data
        if self._is_joining:
            self._is_joining = False
            return False
        self._batch, self._shuffle = batch, shuffle
        self._round_samples = batch * full
        goes_on = bool(ledger and is_same and ledger.epoch == epoch and ledger.length == len(data))
        if ledger and goes_on:
            # A loop that was left early: what was drawn in steps is used, and the rest is dealt again.
            ledger.commit(self._everyone or [self.drawn] * workers)
        else:
            self.ledger = Ledger(len(data), seed=seed, epoch=epoch, shuffle=shuffle)
            self.ledger.committed = self._resumed
        self._resumed = []
        self.deal(workers)
        return not goes_on

    def deal(self, workers: int, held: Sequence[Ranges] = ()) -> None:
        """Hand out what is left to the workers that are here now."""
        self.drawn, self._everyone = 0, ()
        if self.ledger is None:
            return
        # Where every update is made from one worker's batch, more workers take more samples in a round.
        round_samples = self._round_samples if self._pooled else self._batch * workers
        self.ledger.deal(batch=self._batch, round_samples=round_samples, workers=workers, held=held)

    @property
    def dealing(self) -> Dealing | None:
        return self.ledger.dealing if self.ledger else None

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return self.ledger.length if self.ledger else 0

    @property
    def is_last(self) -> bool:
        """Whether the batch drawn last is the last one that this worker gets."""
        return self.dealing is None or self.drawn >= self.dealing.rounds

    @property
    def batch(self) -> int | None:
        """How many samples a worker should have at a time; None outside a loop."""
        return self._batch if self.data is not None else None

    def batches(self, dealing: Dealing, worker: int) -> Iterator[Any]:
        """This worker's batches, one for every round."""
        assert self.ledger is not None
        ledger, data, epoch = self.ledger, self.data, self.ledger.epoch
        for number in range(dealing.rounds):
            places = dealing.share(number, worker)
            if len(places):
                yield gather(data, ledger.samples(places), epoch)
            else:
                yield empty_like(gather(data, torch.tensor([0]), epoch))

    def note(self, everyone: Sequence[int]) -> None:
        """How many rounds each worker has drawn."""
        self._everyone = everyone

    def commit(self) -> None:
        """What everyone had drawn at the last meeting is safe."""
        if self.ledger and self._everyone:
            self.ledger.commit(self._everyone)

    def in_hand(self, worker: int) -> Ranges:
        return self.ledger.in_hand(worker, self.drawn) if self.ledger else []

    def end_epoch(self) -> bool:
        """After the last commit; says whether every sample of the epoch was used, or some must be dealt again."""
        assert self.ledger is not None
        tally = self.ledger.tally()
        if tally["never"]:
            return False
        self.tally.update(tally)
        return True

    @property
    def committed(self) -> Ranges:
        """Of the epoch that is under way."""
        return self.ledger.committed if self.ledger else self._resumed

    def resume(self, committed: Ranges) -> None:
        self.ledger, self._resumed = None, committed

    def record(self) -> Record | None:
        if self.ledger is None:
            return None
        return Record(
            length=self.ledger.length,
            epoch=self.ledger.epoch,
            shuffle=self._shuffle,
            batch=self._batch,
            round_samples=self._round_samples,
            committed=self.ledger.committed,
            is_in_loop=self.data is not None,
            tally=dict(self.tally),
        )

    def take_over(self, record: Record | None, seed: int) -> None:
        """Be where others are."""
        self._is_joining = record is not None and record.is_in_loop
        if record is None:
            self.ledger = None
            return
        self.ledger = Ledger(record.length, seed=seed, epoch=record.epoch, shuffle=record.shuffle)
        self.ledger.committed = record.committed
        self.tally = Counter(record.tally)
        self._shuffle, self._batch, self._round_samples = record.shuffle, record.batch, record.round_samples
