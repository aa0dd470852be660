"""Which samples of an epoch are committed, and which worker gets what of the rest.

The order of an epoch depends on the seed and the epoch alone. An assignment cuts what is left of it into rounds, one
batch for each worker; it holds as long as the workers are the same. When workers come or go, what is neither committed
nor outstanding at a worker that is still there is assigned anew: so every sample is committed exactly once, whichever
workers die or join.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]  # places in the order, from … to
Ranges = list[Range]


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """Some places in rounds, for so many workers; `batch` is what one of them should have at a time.

    `held` are the rounds that each worker has outstanding from before. They come first.
    """

    rest: Tensor
    batch: int
    round_samples: int
    workers: int
    held: Sequence[Sequence[Tensor]]

    def rounds(self, worker: int) -> int:
        return len(self.held[worker]) + rounds(len(self.rest), self.round_samples)

    def share(self, number: int, worker: int) -> Tensor:
        """A worker's places in a round."""
        held = self.held[worker]
        return held[number] if number < len(held) else self._assigned(number - len(held), worker)

    def _assigned(self, number: int, worker: int) -> Tensor:
        """As above, in a round that is assigned here.

        The last round may be short: it is divided evenly among as many workers as can have two samples each, since
        batch norm cannot train on one; the others get an empty share.
        """
        taken = self.rest[number * self.round_samples : (number + 1) * self.round_samples]
        sharers = self.workers
        if len(taken) < self.round_samples:
            sharers = min(self.workers, max(len(taken) // 2, -(-len(taken) // self.batch)))
        first, last = (len(taken) * min(place, sharers) // sharers for place in (worker, worker + 1))
        return taken[first:last]


class Ledger:
    """The samples `0 … length-1` in one epoch; a place is a sample's position in the epoch's order."""

    def __init__(self, length: int, *, seed: int, epoch: int = 0, shuffle: bool = True) -> None:
        self.length = length
        self.epoch = epoch
        self.times = torch.zeros(length, dtype=torch.uint8)  # by place: how often it was committed
        self._order = torch.arange(length)
        if shuffle:
            generator = torch.Generator().manual_seed(hash((seed, epoch)) & 0x7FFF_FFFF_FFFF_FFFF)
            self._order = torch.randperm(length, generator=generator)
        self.assign(batch=1, round_samples=1, workers=1)

    def assign(
        self, *, batch: int, round_samples: int, workers: int, held: Sequence[Sequence[Ranges]] = ()
    ) -> None:
        """Assign what is left, in rounds; `held` are those that each worker has outstanding from before."""
        free = self.times == 0
        kept = [[_places(ranges) for ranges in one] for one in held] or [[]] * workers
        for places in itertools.chain.from_iterable(kept):
            free[places] = False
        rest = free.nonzero().flatten()
        self.assignment = Assignment(
            rest=rest, batch=batch, round_samples=round_samples, workers=workers, held=kept
        )
        self._settled = [0] * workers  # by worker: rounds whose samples are committed

    def samples(self, places: Tensor) -> Tensor:
        return self._order[places]

    def commit(self, drawn: Sequence[int]) -> None:
        """What the workers have used is safe: by worker, its shares of so many rounds, those from before included."""
        for worker, rounds in enumerate(drawn):
            for number in range(self._settled[worker], rounds):
                self.times[self.assignment.share(number, worker)] += 1
            self._settled[worker] = max(self._settled[worker], rounds)

    def correct(self, counted: Tensor) -> None:
        """The surviving replicas show what is safe: these places, as flags, and no others."""
        self.times = torch.where(counted, self.times.clamp(min=1), 0)

    def settled(self, worker: int) -> int:
        """How many rounds of a worker are committed."""
        return self._settled[worker]

    def outstanding(self, worker: int, drawn: int) -> list[Ranges]:
        """The rounds that a worker which has drawn so many has and has not committed."""
        numbers = range(self._settled[worker], drawn)
        return [ranges_of(self.assignment.share(number, worker)) for number in numbers]

    @property
    def committed(self) -> Ranges:
        return ranges_of(self.times.nonzero().flatten())

    @committed.setter
    def committed(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.times.zero_()
        self.times[_places(ranges)] = 1

    def tally(self) -> dict[str, int]:
        """How many samples were committed once, more often, and not at all."""
        return {
            "once": int((self.times == 1).sum()),
            "twice": int((self.times > 1).sum()),
            "never": int((self.times == 0).sum()),
        }


def rounds(length: int, round_samples: int) -> int:
    """How many rounds an epoch has."""
    return -(-length // round_samples)


def _places(ranges: Iterable[tuple[int, int]]) -> Tensor:
    parts = [torch.arange(first, last) for first, last in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def flags(ranges: Iterable[Range], length: int) -> Tensor:
    """By place, whether it is in these ranges."""
    found = torch.zeros(length, dtype=torch.bool)
    for first, last in ranges:
        found[first:last] = True
    return found


def ranges_of(places: Tensor) -> Ranges:
    """Ascending places as ranges."""
    if not len(places):
        return []
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return [(first, last + 1)]
    breaks = (places.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(places)]
    return [(int(places[a]), int(places[b - 1]) + 1) for a, b in itertools.pairwise(edges)]
