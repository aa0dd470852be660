"""Locks among the workers of a host, one for each of them; the kernel takes back those of a worker that dies."""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager


class Locks:
    """Locks on bytes of the host's memory from `offset` on: nothing is written there.

    They belong to the open file, which forked and inherited descriptors share, so every worker opens the memory anew.
    """

    def __init__(self, memory_fd: int, offset: int) -> None:
        self._fd = os.open(f"/proc/self/fd/{memory_fd}", os.O_RDWR | os.O_CLOEXEC)
        self._offset = offset

    @contextmanager
    def held(self, *indices: int) -> Iterator[None]:
        """Have some of the locks; taken in the order of their numbers, so that no cycle of waiting workers arises."""
        taken: list[int] = []
        try:
            for index in sorted(set(indices)):
                self._set(index, fcntl.F_WRLCK)
                taken.append(index)
            yield
        finally:
            for index in taken:
                self._set(index, fcntl.F_UNLCK)

    def _set(self, index: int, kind: int) -> None:
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, self._offset + index, 1, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, request)

    def close(self) -> None:
        os.close(self._fd)
