"""The memory that the workers of one host share: anonymous, growing, gone with the last process.

It is a `memfd`: not a file in `/dev/shm` (64 MB in many containers, where writing past the end is a bus error), no name
to clean up, nothing left after `kill -9` of every process. A peer gets it by inheritance or through `/proc/<pid>/fd`.
"""

import contextlib
import ctypes
import mmap
import os

import torch
from torch import Tensor

from manyhands.comm.transports.free_memory import available_bytes
from manyhands.errors import MemoryShort

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None)
_map = _libc.mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Arena:
    """Regions handed out one after the other from `start` on; every worker asks for the same ones in the same order."""

    def __init__(self, fd: int, start: int = 0) -> None:
        self.fd = fd
        self.start = start
        self._used = start
        self._maps: list[mmap.mmap] = []

    def map(self, length: int) -> mmap.mmap:
        """The next region, zero-filled; no one needs to lead."""
        length = -(-length // PAGE) * PAGE
        end = self._used + length
        # Unlike ftruncate this can only grow: a slower worker must not cut off what a faster one has added.
        os.posix_fallocate(self.fd, end - 1, 1)
        region = mmap.mmap(self.fd, length, offset=self._used)
        self._used = end
        self._maps.append(region)
        return region

    def reserve(self, length: int) -> int:
        """The next region, of addresses alone: where it begins."""
        start, self._used = self._used, self._used + -(-length // PAGE) * PAGE
        return start

    def at(self, offset: int, length: int) -> mmap.mmap:
        """A region at a place that all processes with this memory know, beyond those that `map` returns."""
        os.posix_fallocate(self.fd, offset + length - 1, 1)
        region = mmap.mmap(self.fd, length, offset=offset)
        self._maps.append(region)
        return region

    def tensor(self, length: int, dtype: torch.dtype) -> Tensor:
        """A vector over the next region."""
        if not length:
            return torch.empty(0, dtype=dtype)
        region = self.map(length * dtype.itemsize)
        return torch.frombuffer(region, dtype=dtype, count=length)

    @property
    def used(self) -> int:
        return self._used

    def give_back(self, start: int, stop: int) -> None:
        """Return the memory of a range to the kernel; a process that still reads it sees zeros."""
        give_back(self.fd, start, stop)

    def keep_values(self, vector: Tensor) -> None:
        """From now on the pages of a vector are this process's own, at the same address: what still shows some of it,
        as a `state_dict` that the script has taken, keeps its values when the range is given back."""
        start = vector.data_ptr() // PAGE * PAGE
        stop = -(-(vector.data_ptr() + vector.numel() * vector.element_size()) // PAGE) * PAGE
        regions = [
            one for one in self._maps if _address(one) <= start and stop <= _address(one) + _whole(one)
        ]
        if not regions or not vector.numel():
            return
        values = ctypes.string_at(start, stop - start)
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        place = _map(start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
        if place == start:
            ctypes.memmove(start, values, stop - start)
            self._maps.remove(regions[0])  # it goes with the last tensor that shows some of it

    def close(self) -> None:
        for region in self._maps:
            with contextlib.suppress(
                BufferError
            ):  # a tensor still lives in it; the memory goes with that tensor
                region.close()
        os.close(self.fd)


def _whole(region: mmap.mmap) -> int:
    """Its bytes to the end of its last page, all of which is mapped."""
    return -(-len(region) // PAGE) * PAGE


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def give_back(fd: int, start: int, stop: int) -> None:
    """Return a range of anonymous memory to the kernel."""
    if stop <= start:
        return
    # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    _libc.fallocate(fd, 3, ctypes.c_int64(start), ctypes.c_int64(stop - start))


def require_memory(needed: int, what: str) -> None:
    """Refuse before training starts rather than be killed in the middle of it."""
    free = available_bytes()
    if needed > free:
        raise MemoryShort(
            f"{what} need {needed / 1e9:.2f} GB on this host and {free / 1e9:.2f} GB are free; "
            "use fewer workers, a smaller model or an optimizer with less state"
        )
