"""Sums through the memory of a host; with several hosts, owners of the same part exchange it between them.

A vector from `SharedComm.vector` lies in the host's memory already: every worker adds up its part of it for all,
in place, and writes the sum to all. Any other vector passes in chunks that fit the caches, through a few buffers per
worker that are used in turn. Each chunk goes through stages: `put` it where the others see it; with many workers,
`reduce` the worker's own part of it for all; `take` the sum. A worker runs some chunks ahead of the others before it
has to wait, so a short delay of one does not stop all. With several hosts it is copied whole: what goes over the
network goes at once, since every chunk would have to wait for all hosts.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.background_sum import Background
from manyhands.comm.comm import Comm
from manyhands.comm.grouping import grouped
from manyhands.comm.pairs import swap
from manyhands.comm.transports.counters import StepCounter
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.host_group import HostGroup
from manyhands.comm.transports.transport import Transport

SHARE_BYTES = 1 << 18  # of a chunk, for each worker to add up: stays in a core's cache
LARGEST_CHUNK_BYTES = 1 << 20
BUFFERS = 4  # per worker
AHEAD = 1  # how many chunks a stage runs before the next one follows
DIRECT_BYTES = 1 << 18  # up to here every worker adds up everything itself: one barrier instead of two


class Lanes(Protocol):
    """The exchange between hosts, in as many lanes as the largest host has workers."""

    lanes: int

    def sum_lane(self, vector: Tensor, lane: int) -> None: ...

    def mine(self) -> Sequence[int]: ...


def chunk_bytes(workers: int) -> int:
    return min(workers * SHARE_BYTES, LARGEST_CHUNK_BYTES)


class SharedComm(Comm):
    """All workers of a host (and, through `between`, of all hosts) as replicas of their own."""

    def __init__(
        self,
        host: Host | HostGroup,
        rank: int,
        size: int,
        between: Lanes | None = None,
        transport: Callable[[], Transport] | None = None,
        remote: Callable[[], Transport] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._host = host
        self._between = between
        self._transport = transport  # for pairs; made at the first exchange, by all workers together
        self._remote = remote  # for pairs on different hosts, of which each begins when it is ready
        self._buffers: _Buffers | None = None
        self._done = 0  # chunks that went through, over all sums
        self._in_place: list[_Rows] = []
        self._scratch: _Rows | None = None  # where vectors from elsewhere are added up, with several hosts
        self._background = Background()
        self._pair = Background()
        self._swapped: Tensor | None = None
        self._locals: dict[int | None, SharedComm] = {}

    def vector(self, length: int, dtype: torch.dtype) -> Tensor:
        if self.size == 1 or not length or isinstance(self._host, HostGroup):
            return super().vector(length, dtype)
        rows = _Rows(self._host, length, dtype)
        self._in_place.append(rows)
        return rows.mine[:length]

    def keep_values(self, vector: Tensor) -> None:
        if isinstance(self._host, Host):
            self._host.arena.keep_values(vector)

    def give_back(self, vector: Tensor) -> None:
        for rows in self._in_place:
            if rows.mine.data_ptr() == vector.data_ptr():
                self._in_place.remove(rows)
                rows.give_back()
                return

    def sum_(self, vector: Tensor) -> None:
        with telemetry.timed("exchange"):
            self._background.finish()  # all workers sum in the same order
            self._sum(vector)

    def start_sum(self, vector: Tensor) -> None:
        self.finish_sum()
        # By all workers at the same point of their work: not in the thread.
        if self._between:
            self._claim_scratch(vector)
        else:
            self._claim_buffers()
        self._background.start(lambda: self._sum(vector))
        self._started = vector

    def finish_sum(self) -> Tensor | None:
        with telemetry.timed("exchange"):
            self._background.finish()
        return super().finish_sum()

    def sum_is_done(self) -> bool:
        return self._background.is_done()

    def swap(self, peer: int, vector: Tensor) -> Tensor:
        if not self._transport:
            return super().swap(peer, vector)
        with telemetry.timed("exchange"):
            return swap(self._transport(), peer, vector)

    def start_swap(self, peer: int, vector: Tensor) -> None:
        if not self._remote:
            return super().start_swap(peer, vector)
        transport = self._remote()

        def meet() -> None:
            self._swapped = swap(transport, peer, vector)

        self._pair.start(meet)

    def swap_is_done(self) -> bool:
        return self._pair.is_done()

    def finish_swap(self) -> Tensor | None:
        with telemetry.timed("exchange"):
            self._pair.finish()
        found, self._swapped = self._swapped, None
        return found

    def local(self, groups: int | None = None) -> "SharedComm":
        if groups not in self._locals:
            host = self._host
            assert isinstance(host, Host), "a group has no groups"
            part = HostGroup(host, grouped(range(host.size), self.size, groups))
            local = SharedComm(part, part.index, part.size)
            local._claim_buffers()  # also a worker that is alone in its group: all must ask for memory alike
            self._locals[groups] = local
        return self._locals[groups]

    def _claim_buffers(self) -> "_Buffers":
        self._buffers = self._buffers or _Buffers(self._host)
        return self._buffers

    def _claim_scratch(self, vector: Tensor) -> "_Rows":
        """Memory in which a vector can be added up; it only grows."""
        if self._scratch is None or self._scratch.mine.nbytes < vector.nbytes:
            assert isinstance(self._host, Host), "groups of a host have nothing to do with others"
            if self._scratch:
                self._scratch.give_back()
            self._scratch = _Rows(self._host, vector.nbytes, torch.uint8)
        return self._scratch

    def _sum(self, vector: Tensor) -> None:
        if self.size == 1 or not vector.numel():
            return
        if vector.nbytes <= DIRECT_BYTES and self._between is None:
            self._sum_at_once(vector.view(-1))
        elif rows := next((rows for rows in self._in_place if rows.hold(vector)), None):
            self._sum_in_place(rows, vector)
        elif self._between:
            self._sum_in_scratch(vector.view(-1))
        else:
            self._sum_through_buffers(vector)
        telemetry.count("shared_bytes", vector.nbytes)

    def _sum_at_once(self, vector: Tensor) -> None:
        """Every worker's whole vector to all, and each adds them up."""
        buffers = self._claim_buffers()
        self._put(buffers, self._done, vector)
        self._take_sum(buffers, self._done, vector)
        self._done += 1

    def _sum_in_place(self, rows: "_Rows", vector: Tensor) -> None:
        """Each worker adds up its lanes' parts of all rows, and writes the sums to all rows."""
        mine, others = rows.like(vector)
        block = SHARE_BYTES // mine.element_size() if self._between is None else mine.numel()
        rows.meet()
        for lane, piece in self._parts(mine.numel()):
            for start in range(piece.start, piece.stop, block):
                part = slice(start, min(start + block, piece.stop))
                total = mine[part]
                for row in others:
                    total.add_(row[part])
                if self._between:
                    self._between.sum_lane(total, lane)
                for row in others:
                    row[part].copy_(total)
        rows.meet()

    def _sum_in_scratch(self, vector: Tensor) -> None:
        scratch = self._claim_scratch(vector)
        copy = scratch.mine.view(vector.dtype)[: len(vector)]
        copy.copy_(vector)
        self._sum_in_place(scratch, copy)
        vector.copy_(copy)

    def _parts(self, length: int) -> list[tuple[int, slice]]:
        """The lanes that this worker serves, each with its part of a vector."""
        count = self._between.lanes if self._between else self._host.size
        mine = self._between.mine() if self._between else [self._host.index]
        return [(lane, slice(length * lane // count, length * (lane + 1) // count)) for lane in mine]

    def _sum_through_buffers(self, vector: Tensor) -> None:
        buffers = self._claim_buffers()
        chunks = vector.view(-1).split(chunk_bytes(self._host.size) // vector.element_size())
        by_each = self._host.size == 2  # one barrier less, and nothing is added up twice that would be once
        stages = [self._put, self._take_sum] if by_each else [self._put, self._reduce, self._take_result]
        first = self._done
        for tick in range(len(chunks) + AHEAD * (len(stages) - 1)):
            for lag, stage in enumerate(stages):
                if 0 <= (number := tick - lag * AHEAD) < len(chunks):
                    stage(buffers, first + number, chunks[number])
        self._done += len(chunks)

    def _put(self, buffers: "_Buffers", number: int, chunk: Tensor) -> None:
        buffers.taken.wait(number + 1 - BUFFERS)  # no worker still needs what this buffer held before
        buffers.views(number, chunk)[self._host.index].copy_(chunk)
        buffers.filled.publish(number + 1)

    def _take_sum(self, buffers: "_Buffers", number: int, chunk: Tensor) -> None:
        """Every worker adds up everything, in the same order."""
        buffers.filled.wait(number + 1)
        _add_up(buffers.views(number, chunk)[: self._host.size], chunk)
        buffers.taken.publish(number + 1)

    def _reduce(self, buffers: "_Buffers", number: int, chunk: Tensor) -> None:
        """Each worker adds up its part of the chunk, and shows the result."""
        buffers.filled.wait(number + 1)
        *parts, result = buffers.views(number, chunk)
        for _, piece in self._parts(chunk.numel()):
            _add_up([part[piece] for part in parts], result[piece])
        buffers.reduced.publish(number + 1)

    def _take_result(self, buffers: "_Buffers", number: int, chunk: Tensor) -> None:
        buffers.reduced.wait(number + 1)
        chunk.copy_(buffers.views(number, chunk)[-1])
        buffers.taken.publish(number + 1)


def _add_up(parts: Sequence[Tensor], into: Tensor) -> None:
    """The sum in the given order."""
    torch.add(parts[0], parts[1], out=into)
    for part in parts[2:]:
        into.add_(part)


class _Buffers:
    """The memory that chunks pass through, and how far every worker has come with them."""

    def __init__(self, host: Host | HostGroup) -> None:
        size_bytes = chunk_bytes(host.size)
        most = host.most if isinstance(host, HostGroup) else host.size
        memory = host.allocate(BUFFERS * (most + 1) * chunk_bytes(most), torch.uint8)
        self._rows = memory[: BUFFERS * (host.size + 1) * size_bytes].view(BUFFERS, host.size + 1, size_bytes)
        self._made: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self.filled: StepCounter = host.progress()
        self.reduced: StepCounter = host.progress()
        self.taken: StepCounter = host.progress()

    def views(self, number: int, like: Tensor) -> list[Tensor]:
        """Chunk `number` of every worker, and last the place for the result, as vectors like the given one."""
        key = (number % BUFFERS, like.dtype, like.numel())
        made = self._made.get(key)
        if made is None:
            if len(self._made) > 64:
                self._made.clear()  # many different lengths: do not collect views for ever
            made = [row.view(like.dtype)[: like.numel()] for row in self._rows[number % BUFFERS]]
            self._made[key] = made
        return made


class _Rows:
    """A vector of which every worker of the host has its own, all in the host's memory."""

    def __init__(self, host: Host, length: int, dtype: torch.dtype) -> None:
        self._host = host
        self._from = host.arena.used
        row = -(-length * dtype.itemsize // 64) * 64 // dtype.itemsize  # begins on a cache line
        self._rows = host.allocate(host.size * row, dtype).view(host.size, row)
        self.mine = self._rows[host.index]
        self._progress = host.progress()
        self._meetings = 0

    def hold(self, vector: Tensor) -> bool:
        """Whether this vector is, or is part of, this worker's own."""
        return 0 <= vector.data_ptr() - self.mine.data_ptr() < self.mine.nbytes

    def like(self, vector: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The same part of all vectors: this worker's, and the others' in a fixed order."""
        start = (vector.data_ptr() - self.mine.data_ptr()) // vector.element_size()
        rows = self._rows.view(vector.dtype)[:, start : start + vector.numel()]
        return rows[self._host.index], [rows[i] for i in range(self._host.size) if i != self._host.index]

    def meet(self) -> None:
        self._meetings += 1
        self._progress.publish(self._meetings)
        self._progress.wait(self._meetings)

    def give_back(self) -> None:
        self._host.barrier()
        if self._host.index == 0:
            self._host.arena.give_back(self._from, self._from + self._rows.nbytes)
