"""Replicas of a host's workers that lie side by side, each open to the others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.locks import Locks

CHUNK = 1 << 16  # elements: two of these and their mean stay in a core's cache


class Neighbours:
    """The parameters of all workers of a host; a worker that changes some holds their locks."""

    def __init__(self, host: Host) -> None:
        self.ranks = host.ranks
        self.index = host.index
        self.size = host.size
        self._host = host
        self._locks = Locks(host.arena.fd, host.arena.used)
        self._rows: list[Tensor] = []
        self._memory_from = self._memory_to = host.arena.used

    def claim(self, length: int, dtype: torch.dtype) -> Tensor:
        """This worker's parameters."""
        self._rows = [self._host.allocate(length, dtype) for _ in range(self.size)]
        self._memory_to = self._host.arena.used
        return self._rows[self.index]

    def average_with(self, peer: int) -> None:
        """This worker and a neighbour both get the mean of their parameters, as if in one instant."""
        mine, theirs = (self._rows[index].split(CHUNK) for index in (self.index, peer))
        with telemetry.timed("exchange"), self._locks.held(self.index, peer):
            for one, other in zip(mine, theirs, strict=True):
                one.add_(other).mul_(0.5)
                other.copy_(one)
        telemetry.count("shared_bytes", self._rows[peer].nbytes)

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """While no other worker may change this worker's parameters."""
        with self._locks.held(self.index):
            yield

    def close(self) -> None:
        """Give the memory back, which no worker reads any more."""
        self._locks.close()
        self._host.barrier()
        for row in self._rows[self.index : self.index + 1]:
            self._host.arena.keep_values(row)
        self._host.barrier()
        if self.index == 0:
            self._host.arena.give_back(self._memory_from, self._memory_to)
