"""A count of the samples that steps have really used, kept apart from the ledger's own books.

The ledger says which samples go into which step. Here every worker notes which ones did: it recognises a batch that
the script was given by its tensors when a step uses it, or by its turn if the script has made something else of it. At
the end of an epoch the notes of all workers show which samples were used once, more often, or never.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from manyhands.data.ledger import Ranges, ranges_of
from manyhands.data.loading import samples_in


@dataclass(eq=False)
class _Handed:
    """A batch that the script has got: the places of its samples."""

    places: Ranges
    samples: int


class Audit:
    """What the steps of this worker have used, and what those of workers that left are known to have used."""

    def __init__(self) -> None:
        self.used: Ranges = []
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

    def hand(self, batch: Any, places: Tensor) -> None:
        """The script gets a batch."""
        one = _Handed(ranges_of(places), len(places))
        for tensor in _tensors(batch):
            self._handed[tensor] = one
        self._unused.append(one)

    def find(self, batches: Sequence[Any], total: int) -> Ranges:
        """The places of the samples in these batches, `total` in all, which a step is about to use."""
        found: Ranges = []
        for batch in batches:
            samples = total if len(batches) == 1 else samples_in(batch)
            one = self._recognised(batch) if samples else None
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

    def count(self, notes: Iterable[Ranges]) -> Tensor:
        """By place, how often it was used, from the notes of all workers."""
        times = self._before.to(torch.int32)
        for ranges in notes:
            for first, last in ranges:
                times[first:last] += 1
        return times

    def _recognised(self, batch: Any) -> _Handed | None:
        return next((one for tensor in _tensors(batch) if (one := self._handed.get(tensor))), None)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def tally(times: Tensor) -> dict[str, int]:
    """How many samples were used once, more often, and not at all."""
    return {
        "once": int((times == 1).sum()),
        "twice": int((times > 1).sum()),
        "never": int((times == 0).sum()),
    }
