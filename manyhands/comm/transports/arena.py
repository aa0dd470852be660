"""The memory that the workers of one host share: anonymous, growing, gone with the last process.

It is a `memfd`: not a file in `/dev/shm` (64 MB in many containers, where writing past the end is a bus error), no name
to clean up, nothing left after `kill -9` of every process. A peer gets it by inheritance or through `/proc/<pid>/fd`.
"""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from manyhands.errors import MemoryShort

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None)
RESERVE = 0.05  # of the host's memory: what the operating system and the page cache should keep


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

    def close(self) -> None:
        for region in self._maps:
            with contextlib.suppress(
                BufferError
            ):  # a tensor still lives in it; the memory goes with that tensor
                region.close()
        os.close(self.fd)


def give_back(fd: int, start: int, stop: int) -> None:
    """Return a range of anonymous memory to the kernel."""
    if stop <= start:
        return
    # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    _libc.fallocate(fd, 3, ctypes.c_int64(start), ctypes.c_int64(stop - start))


def available_bytes() -> int:
    """What can still be allocated here: the smaller of the host's and the container's free memory."""
    free = int(_field("/proc/meminfo", "MemAvailable:")) * 1024
    total = int(_field("/proc/meminfo", "MemTotal:")) * 1024
    limit = _number("/sys/fs/cgroup/memory.max")
    if limit is not None:
        total = min(total, limit)
        # The page cache counts as used there, but the kernel gives it up when asked.
        cache = sum(
            int(_field("/sys/fs/cgroup/memory.stat", f"{kind}_file ")) for kind in ("active", "inactive")
        )
        free = min(free, limit - (_number("/sys/fs/cgroup/memory.current") or 0) + cache)
    return max(0, free - int(RESERVE * total))


def require_memory(needed: int, what: str) -> None:
    """Refuse before training starts rather than be killed in the middle of it."""
    free = available_bytes()
    if needed > free:
        raise MemoryShort(
            f"{what} need {needed / 1e9:.2f} GB on this host and {free / 1e9:.2f} GB are free; "
            "use fewer workers, a smaller model or an optimizer with less state"
        )


def _field(path: str, name: str) -> str:
    if not Path(path).exists():
        return "0"
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split()[1]
    return "0"


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
