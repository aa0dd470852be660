"""Numbered places for some bytes each, in the memory that the processes of a host share.

The length of the bytes need not be known beforehand: addresses are plenty, and only what is written takes memory.
"""

import os
import struct

BYTES = 1 << 42  # of addresses, for all slots together
_LENGTH = struct.Struct("q")


class Slots:
    """From `start` on in the memory behind `fd`; a process that writes one makes sure that no other reads it."""

    def __init__(self, fd: int, start: int, count: int) -> None:
        self._fd = fd
        self._start = start
        self._room = BYTES // max(1, count)

    def put(self, number: int, content: bytes) -> bool:
        """Returns whether the memory sufficed."""
        if _LENGTH.size + len(content) > self._room:
            return False
        at = self._at(number)
        for part in (_LENGTH.pack(len(content)), memoryview(content)):
            while part:
                written = os.pwrite(self._fd, part, at)
                at, part = at + written, part[written:]
        return True

    def get(self, number: int) -> bytes:
        at = self._at(number)
        (length,) = _LENGTH.unpack(os.pread(self._fd, _LENGTH.size, at))
        parts, at, stop = [], at + _LENGTH.size, at + _LENGTH.size + length
        while at < stop:
            parts.append(os.pread(self._fd, stop - at, at))
            at += len(parts[-1])
        return b"".join(parts)

    def _at(self, number: int) -> int:
        return self._start + number * self._room
