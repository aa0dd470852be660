"""Which samples of an epoch go to whom.

The order of an epoch depends on the seed and the epoch alone, and a step takes the next samples of that order, whoever
and however many the workers are. A position in the order is therefore all that is needed to resume exactly.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


class Ledger:
    """The samples `0 … length-1`, each handed out exactly once per epoch."""

    def __init__(self, length: int, *, seed: int, shuffle: bool = True) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle

    def order(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(hash((self._seed, epoch)) & 0x7FFF_FFFF_FFFF_FFFF)
        return torch.randperm(self.length, generator=generator)

    def shares(self, epoch: int, *, start: int, batch: int, rank: int, workers: int) -> Iterator[Tensor]:
        """This worker's samples of each step from position `start` on.

        A step takes `batch` samples per worker. The last one may be short: it is divided evenly among as many workers
        as can have two samples each, since batch norm cannot train on one; the others get an empty share.
        """
        order = self.order(epoch)
        for begin in range(start, self.length, batch * workers):
            taken = order[begin : begin + batch * workers]
            sharers = workers
            if len(taken) < batch * workers:
                sharers = max(min(workers, len(taken) // 2), -(-len(taken) // batch))
            first, last = (len(taken) * min(place, sharers) // sharers for place in (rank, rank + 1))
            yield taken[first:last]

    def steps(self, batch: int, workers: int) -> int:
        return -(-self.length // (batch * workers))
