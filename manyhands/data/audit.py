"""A count of the samples that steps have really used, kept apart from the ledger's own books.

The ledger says which samples go into which step. Here every worker notes which ones did: it recognises a batch that
the script was given by its tensors when a step uses it, or by its turn if the script has made something else of it. At
the end of an epoch the notes of all workers show which samples were used once, more often, or never.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from manyhands.data.ledger import Ranges, ranges_of
from manyhands.data.structure import samples_in, tensors_in


@dataclass(eq=False)
class _Handed:
    """A batch that the script has got: the places of its samples."""

    places: Ranges
    samples: int


class Audit:
    """What the steps of this worker have used, and what those of workers that left are known to have used."""

    def __init__(self) -> None:
        self.used: Ranges = []
        self.given = 0  # samples of the batch that the script got last
        self._before = torch.zeros(0, dtype=torch.uint8)  # by place: how often it was used before these notes
        self._unused: deque[_Handed] = deque()
        self._handed = WeakIdKeyDictionary()  # by tensor, for as long as the script keeps it

    def begin(self, times: Tensor) -> None:
        """From here on it is this worker's notes that count; before it, so many times by place were safe.

        What was used and was not safe by then is still in the notes: it was this worker's.
        """
        self._before = times.clone()
        self.used = [
            (first + start, first + end)
            for first, last in self.used
            for start, end in ranges_of((times[first:last] == 0).nonzero().flatten())
        ]

    def hand(self, batch: Any, places: Tensor, samples: int) -> None:
        """The script gets a batch."""
        one = _Handed(ranges_of(places), samples)
        for tensor in tensors_in(batch):
            self._handed[tensor] = one
        self._unused.append(one)
        self.given = samples

    def are_of_one(self, batches: Sequence[Any]) -> bool:
        """Whether these are the tensors of one batch."""
        ones = {self._handed.get(one) if isinstance(one, Tensor) else None for one in batches}
        return len(batches) > 1 and len(ones) == 1 and None not in ones

    def samples_of(self, batch: Any) -> int | None:
        """How many samples a batch was made of, if the script has got it here."""
        one = next(self._recognised(batch), None)
        return None if one is None else one.samples

    def turn(self) -> tuple[Ranges, int] | None:
        """The places of the batch whose turn it is, and their number: a step is about to use something made of it."""
        if not self._unused:
            return None
        one = self._unused.popleft()
        return one.places, one.samples

    def find(self, batches: Sequence[Any], total: int) -> Ranges:
        """The places of the samples in these batches, `total` in all, which a step is about to use."""
        found: Ranges = []
        for batch in batches:
            samples = total if len(batches) == 1 else samples_in(batch)
            one = next(self._recognised(batch), None) if samples else None
            if one is not None:
                found += one.places
                if one in self._unused:
                    self._unused.remove(one)
                continue
            while samples > 0 and self._unused:
                turn = self._unused.popleft()
                found += turn.places
                samples -= turn.samples
        return found

    def recognise(self, batches: Sequence[Any]) -> tuple[Ranges, int | None]:
        """As above, of a script that has several streams: the places of what is recognised, and how many batches the
        script has got after the last of these that is new."""
        ones = list(dict.fromkeys(one for batch in batches for one in self._recognised(batch)))
        waiting = None
        for one in ones:
            if one in self._unused:
                waiting = len(self._unused) - 1 - self._unused.index(one)
                self._unused.remove(one)
        return list(itertools.chain.from_iterable(one.places for one in ones)), waiting

    def use_next(self, count: int) -> Ranges:
        """The places of so many batches that the script got first and no step has used."""
        turns = [self._unused.popleft() for _ in range(min(count, len(self._unused)))]
        return list(itertools.chain.from_iterable(one.places for one in turns))

    def count(self, notes: Iterable[Ranges]) -> Tensor:
        """By place, how often it was used, from the notes of all workers."""
        times = self._before.to(torch.int32)
        for ranges in notes:
            for first, last in ranges:
                times[first:last] += 1
        return times

    def _recognised(self, batch: Any) -> Iterator[_Handed]:
        return (one for tensor in tensors_in(batch) if (one := self._handed.get(tensor)))
