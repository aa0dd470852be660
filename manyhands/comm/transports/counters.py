"""How workers of one host wait for each other: counters in shared memory and the kernel's futex.

Every counter has one writer and only grows, so no atomic read-modify-write is needed: an aligned 64-bit store
is enough. A waiter spins for a few microseconds (a step of a small model is shorter than a context switch), then
gives its core away, then sleeps in the kernel until the writer wakes it.
"""

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Sequence

from manyhands.errors import PeerLost, UsageError

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_LINE = 8  # int64s per cache line: counters of different writers must not share one

_IN_ORDER = ("x86_64", "AMD64")  # processors whose cores see each other's stores in the order of writing

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def refuse_several(workers: int) -> None:
    """Raise if so many workers cannot share the memory of this host.

    A worker writes a vector and then a counter. On a processor that may reorder the two stores, another worker could
    see the new counter and the old vector.
    """
    if workers > 1 and platform.machine() not in _IN_ORDER:
        raise UsageError(
            f"{workers} workers on one host rely on the memory ordering of x86-64, and this is "
            f"{platform.machine()}; use 1 worker per host here (--workers 1), whose threads use all cores"
        )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_PATIENCE = _Timespec(0, 100_000_000)  # how long to sleep before asking whether the peers still live


class Counters:
    """Counters over shared memory; `check` is called now and then while waiting and may raise."""

    def __init__(self, memory: mmap.mmap, check: Callable[[], None], spins: int) -> None:
        self._view = memoryview(memory).cast("q")
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._addresses = [ctypes.c_void_p(start + at * 8) for at in range(0, len(self._view), _LINE)]
        self._check = check
        self._spins = spins

    @staticmethod
    def bytes_needed(count: int) -> int:
        return count * _LINE * 8

    def read(self, index: int) -> int:
        return self._view[index * _LINE]

    def publish(self, index: int, value: int) -> None:
        """A process that sees the new value also sees everything that this worker wrote before."""
        self._view[index * _LINE] = value
        if _FUTEX:
            _libc.syscall(_FUTEX, self._addresses[index], _WAKE, _ALL, None, None, 0)

    def wait(self, index: int, value: int) -> None:
        """Return once the counter has reached `value`."""
        view, position = self._view, index * _LINE
        for _ in range(self._spins):
            if view[position] >= value:
                return
        for _ in range(8):
            if view[position] >= value:
                return
            os.sched_yield()
        while (seen := view[position]) < value:
            self.sleep(index, seen)

    def sleep(self, index: int, seen: int) -> None:
        """Until the counter differs from `seen`; after a tenth of a second without news, look after the peers."""
        if _FUTEX:
            low = ctypes.c_int(
                seen & 0xFFFFFFFF
            )  # the kernel compares 32 bits: the low half, first in memory
            _libc.syscall(_FUTEX, self._addresses[index], _WAIT, low, ctypes.byref(_PATIENCE), None, 0)
        else:
            os.sched_yield()
        if self._view[index * _LINE] == seen:
            try:
                self._check()
            except PeerLost:
                # A peer that published and then ended well, just after we looked, is no loss.
                if self._view[index * _LINE] == seen:
                    raise

    def close(self) -> None:
        self._view.release()


class StepCounter:
    """One growing number per worker of the host."""

    def __init__(self, counters: Counters, index: int, size: int) -> None:
        self._counters = counters
        self._mine = index
        self._peers = tuple(peer for peer in range(size) if peer != index)

    def publish(self, value: int) -> None:
        self._counters.publish(self._mine, value)

    def publish_and_read(self, value: int, peer: int) -> int:
        """Say how far this worker has come; returns how far one of the others has."""
        self._counters.publish(self._mine, value)
        return self._counters.read(peer)

    def read(self, peer: int) -> int:
        """How far one of the workers has come."""
        return self._counters.read(peer)

    def has(self, peer: int, value: int) -> bool:
        """Whether one of the others has come as far, without waiting."""
        return self._counters.read(peer) >= value

    def values(self) -> list[int]:
        """How far every worker has come, this one included."""
        return [self._counters.read(index) for index in range(len(self._peers) + 1)]

    def wait_for(self, peer: int, value: int) -> int:
        """Until one of the others has come as far; returns how far it has."""
        self._counters.wait(peer, value)
        return self._counters.read(peer)

    def wait(self, value: int) -> None:
        """Until all others have come as far."""
        for peer in self._peers:
            self._counters.wait(peer, value)


class CounterTable:
    """Several growing numbers per worker of the host, of which a worker may publish the first few."""

    def __init__(self, counters: Counters, index: int, size: int, columns: int) -> None:
        self._counters = counters
        self._start = index * columns
        self._rows = [range(row * columns, (row + 1) * columns) for row in range(size)]

    def publish(self, values: Sequence[int]) -> None:
        for column, value in enumerate(values):
            self._counters.publish(self._start + column, value)

    def put(self, column: int, value: int) -> None:
        self._counters.publish(self._start + column, value)

    def column(self, column: int) -> list[int]:
        """One number of every worker, this one included."""
        return [self._counters.read(row[column]) for row in self._rows]

    def values(self) -> list[list[int]]:
        """How far every worker has come, this one included."""
        return [[self._counters.read(place) for place in row] for row in self._rows]
