"""Which samples of an epoch are committed, and which worker gets what of the rest.

The order of an epoch depends on the seed and the epoch alone. An assignment cuts what is left of it into rounds, one
batch for each worker; it holds as long as the workers are the same. When workers come or go, what is neither committed
nor outstanding at a worker that is still there is assigned anew: so every sample is committed exactly once, whichever
workers die or join.
"""

import base64
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manyhands.errors import CheckpointError

Range = tuple[int, int]  # places in the order, from … to
Ranges = list[Range]


class DrawnOrder:
    """What a sampler gave in one epoch: the numbers of samples and, where it gave batches, where each of them ends."""

    def __init__(self, numbers: Tensor, ends: Tensor | None = None) -> None:
        self.numbers = numbers
        self.ends = ends

    @property
    def length(self) -> int:
        """Its places: samples, or batches."""
        return len(self.numbers) if self.ends is None else len(self.ends)

    @property
    def sizes(self) -> Tensor | None:
        """How many samples each batch has."""
        return None if self.ends is None else self.ends.diff(prepend=torch.zeros(1, dtype=torch.int64))

    def batch(self, place: int) -> Tensor:
        if self.ends is None:
            return self.numbers[place : place + 1]
        return self.numbers[int(self.ends[place - 1]) if place else 0 : int(self.ends[place])]

    def encode(self) -> str:
        """As text, for other workers and checkpoints."""
        count = torch.tensor([len(self.numbers)])
        parts = [count, self.numbers, *([] if self.ends is None else [self.ends])]
        return base64.b85encode(zlib.compress(torch.cat(parts).numpy().tobytes(), 1)).decode()

    @classmethod
    def decode(cls, text: str) -> "DrawnOrder":
        """What `encode` gave; a text from others is unpacked as far as an order of its length can go."""
        try:
            unpacking, packed = zlib.decompressobj(), base64.b85decode(text)
            head = unpacking.decompress(packed, 8)
            count = int.from_bytes(head, "little", signed=True)
            rest = unpacking.decompress(unpacking.unconsumed_tail, 16 * count + 8) if count > 0 else b""
            values = torch.frombuffer(bytearray(rest), dtype=torch.int64)
        except (ValueError, OverflowError, zlib.error) as error:
            raise CheckpointError(f"an order of samples cannot be read ({error})") from None
        numbers, ends = values[:count], values[count:]
        steps = ends.diff(prepend=torch.zeros(1, dtype=torch.int64)) if len(ends) else ends
        if (
            len(numbers) != count
            or int(numbers.min()) < 0
            or (len(ends) and int(ends[-1]) != count)
            or (steps < 0).any()
        ):
            raise CheckpointError(f"an order of {count} samples has {len(values)} numbers, or wrong ones")
        return cls(numbers, ends if len(ends) else None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """Some places in rounds, for so many workers; `batch` is what one of them should have at a time.

    `held` are the rounds that each worker has outstanding from before. They come first. Where only some workers are
    there to take more, `takers` are these.
    """

    rest: Tensor
    batch: int
    round_samples: int
    workers: int
    held: Sequence[Sequence[Tensor]]
    takers: Sequence[int] = ()

    def rounds(self, worker: int) -> int:
        more = 0 if self.takers and worker not in self.takers else rounds(len(self.rest), self.round_samples)
        return len(self.held[worker]) + more

    @cached_property
    def _left(self) -> int:
        return len(self.rest)

    @property
    def places(self) -> int:
        """How many there are in all."""
        return self._left + sum(len(one) for held in self.held for one in held)

    def used(self, rounds: Sequence[int]) -> int:
        """How many of them are in the first rounds of each worker, so many by worker."""
        first = rounds[0]
        if not self.takers and all(count == first for count in rounds) and not any(self.held):
            return min(first * self.round_samples, self._left)  # as in most steps
        whole, rest = divmod(self._left, self.round_samples)
        found = 0
        for worker, (count, held) in enumerate(zip(rounds, self.held, strict=True)):
            found += sum(map(len, held[:count]))
            more = count - len(held)
            if more > 0 and (not self.takers or worker in self.takers):
                first, last = self._bounds(self.round_samples, worker)
                found += min(more, whole) * (last - first)
                first, last = self._bounds(rest, worker)
                found += (last - first) * (more > whole)
        return found

    def share(self, number: int, worker: int) -> Tensor:
        """A worker's places in a round."""
        held = self.held[worker]
        return held[number] if number < len(held) else self._assigned(number - len(held), worker)

    def _assigned(self, number: int, worker: int) -> Tensor:
        """As above, in a round that is assigned here."""
        taken = self.rest[number * self.round_samples : (number + 1) * self.round_samples]
        first, last = self._bounds(len(taken), worker)
        return taken[first:last]

    def _bounds(self, length: int, worker: int) -> tuple[int, int]:
        """Where a worker's share of a round with so many places is.

        The last round may be short: it is divided evenly among as many workers as can have two samples each, since
        batch norm cannot train on one; the others get an empty share.
        """
        workers = sharers = len(self.takers) or self.workers
        if length < self.round_samples:
            sharers = max(1, min(workers, max(length // 2, -(-length // self.batch))))
        position = self.takers.index(worker) if self.takers else worker
        return length * min(position, sharers) // sharers, length * min(position + 1, sharers) // sharers


class Ledger:
    """The samples of one epoch; a place is a sample's position in the epoch's order.

    The order is a permutation that the seed and the epoch make, cut after `length` of `total` samples, or the `drawn`
    one of a sampler. Where a sampler has given batches, a place is a batch.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int,
        epoch: int = 0,
        shuffle: bool = True,
        total: int | None = None,
        drawn: DrawnOrder | None = None,
    ) -> None:
        self.length = length
        self.epoch = epoch
        self.drawn = drawn
        self.total = length if total is None else total
        self.times = torch.zeros(length, dtype=torch.uint8)  # by place: how often it was committed
        if drawn is not None:
            self._order = drawn.numbers
        elif shuffle:
            generator = torch.Generator().manual_seed(hash((seed, epoch)) & 0x7FFF_FFFF_FFFF_FFFF)
            self._order = torch.randperm(self.total, generator=generator)
        else:
            self._order = torch.arange(length)
        self.assign(batch=1, round_samples=1, workers=1)

    def assign(
        self,
        *,
        batch: int,
        round_samples: int,
        workers: int,
        held: Sequence[Sequence[Ranges]] = (),
        takers: Sequence[int] = (),
    ) -> None:
        """Assign what is left, in rounds; `held` are those that each worker has outstanding from before, and `takers`
        the workers that can take more, if not all can."""
        free = self.times == 0
        kept = [[_places(ranges) for ranges in one] for one in held] or [[]] * workers
        for places in itertools.chain.from_iterable(kept):
            free[places] = False
        rest = free.nonzero().flatten()
        self.assignment = Assignment(
            rest=rest, batch=batch, round_samples=round_samples, workers=workers, held=kept, takers=takers
        )
        self._settled = [0] * workers  # by worker: rounds whose samples are committed

    def samples(self, places: Tensor) -> Tensor:
        """The numbers of the samples at these places, in the data set."""
        if self.drawn is not None and self.drawn.ends is not None:
            return torch.cat([self.drawn.batch(place) for place in places.tolist()])
        return self._order[places]

    @property
    def size(self) -> int:
        """How many samples the epoch has."""
        return self.length if self.drawn is None else len(self.drawn.numbers)

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
        ranges = list(ranges)
        if wrong := [one for one in ranges if not 0 <= one[0] <= one[1] <= self.length]:
            raise CheckpointError(
                f"samples {wrong[0][0]} to {wrong[0][1]} are said to be used, of an epoch with {self.length}"
            )
        self.times.zero_()
        self.times[_places(ranges)] = 1

    def tally(self) -> dict[str, int]:
        """How many samples were committed once, more often, and not at all."""
        return self.count(self.times)

    def count(self, times: Tensor) -> dict[str, int]:
        """How many samples were used once, more often, and not at all, from how often each place was."""
        sizes = self.drawn.sizes if self.drawn is not None else None
        flags = {"once": times == 1, "twice": times > 1, "never": times == 0}
        return {word: int((one if sizes is None else sizes[one]).sum()) for word, one in flags.items()}


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
