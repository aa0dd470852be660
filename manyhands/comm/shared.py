"""Sums through the memory of a host; with several hosts, owners of the same part exchange it between them.

The vector passes in chunks that fit the caches. A worker copies its chunk in, says so, and reads the others' when they
have said so. Two sets of chunks take turns: a worker can copy the next one in while a slower one still reads.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.comm import Comm
from manyhands.comm.transports.host import Host

CHUNK_BYTES = 1 << 18
DIRECT_BYTES = 1 << 16  # up to here every worker adds up everything itself: one meeting instead of two


class Lanes(Protocol):
    """The exchange between hosts, in as many lanes as the largest host has workers."""

    lanes: int

    def sum_lane(self, vector: Tensor, lane: int) -> None: ...

    def mine(self) -> Sequence[int]: ...


class SharedComm(Comm):
    """All workers of a host (and, through `between`, of all hosts) as replicas of their own."""

    def __init__(self, host: Host, rank: int, size: int, between: Lanes | None = None) -> None:
        self.rank = rank
        self.size = size
        self._host = host
        self._between = between
        self._memory: Tensor | None = None
        self._chunks = 0

    def sum_(self, vector: Tensor) -> None:
        if self.size == 1 or not vector.numel():
            return
        flat = vector.view(-1)
        step = CHUNK_BYTES // flat.element_size()
        with telemetry.timed("exchange"):
            for start in range(0, flat.numel(), step):
                self._sum_chunk(flat[start : start + step])

    def _sum_chunk(self, part: Tensor) -> None:
        chunks = self._staged(part)
        mine = chunks[self._host.index]
        mine.copy_(part)
        self._chunks += 1
        self._arrivals.publish(self._chunks)
        self._arrivals.wait(self._chunks)
        telemetry.count("shared_bytes", part.nbytes)
        if self._between is None and (self._host.size == 2 or part.nbytes <= DIRECT_BYTES):
            torch.add(chunks[0], chunks[1], out=part)
            for other in chunks[2 : self._host.size]:
                part.add_(other)
        else:
            self._by_owners(chunks)
            part.copy_(chunks[self._host.size])

    def _by_owners(self, chunks: Sequence[Tensor]) -> None:
        """Each worker adds up its lanes' parts of the chunk, exchanges them between hosts and publishes the result."""
        count = self._between.lanes if self._between else self._host.size
        lanes = self._between.mine() if self._between else [self._host.index]
        *parts, result = chunks
        edges = [result.numel() * lane // count for lane in range(count + 1)]
        for lane in lanes:
            piece = slice(edges[lane], edges[lane + 1])
            total = result[piece]
            total.copy_(parts[0][piece])
            for other in parts[1:]:
                total.add_(other[piece])
            if self._between and total.numel():
                self._between.sum_lane(total, lane)
        self._results.publish(self._chunks)
        self._results.wait(self._chunks)

    def _staged(self, like: Tensor) -> list[Tensor]:
        """This turn's chunk of every worker, and one more for the result, as vectors like the given one."""
        if self._memory is None:
            self._memory = self._host.allocate(2 * (self._host.size + 1) * CHUNK_BYTES, torch.uint8)
            self._arrivals = self._host.progress()
            self._results = self._host.progress()
            self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
        key = (like.dtype, like.numel(), self._chunks % 2)
        views = self._views.get(key)
        if views is None:
            rows = self._memory.view(2, self._host.size + 1, CHUNK_BYTES)[self._chunks % 2]
            views = [row.view(like.dtype)[: like.numel()] for row in rows]
            if len(self._views) > 64:
                self._views.clear()  # many different lengths: do not collect views for ever
            self._views[key] = views
        return views
