"""A little memory that the launcher shares with all processes of its host: one row for each, which both can read.

Before a session exists the workers have no other way to hear of each other. A row has the process id, as long as the
process lives, and how often the process has left `main_process_first`, made a session, and stepped an optimizer of its
own before it made one.
"""

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

FD = "MANYHANDS_PAGE_FD"
ROW = "MANYHANDS_ROW"

TOLD_AT = 10
"""Steps without a session before the launcher says something: a warm-up of a few is none of its business."""

_FORM = struct.Struct("q")
_ROW_BYTES = 64
_PID, _TURNS, _SESSIONS, _OWN_STEPS = range(4)
_LOOK_S = 0.02


class HostPage:
    """The rows, in the memory behind a descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def _get(self, row: int, column: int) -> int:
        found = os.pread(self.fd, 8, row * _ROW_BYTES + 8 * column)
        return int(_FORM.unpack(found)[0]) if len(found) == 8 else 0

    def _set(self, row: int, column: int, value: int) -> None:
        os.pwrite(self.fd, _FORM.pack(value), row * _ROW_BYTES + 8 * column)

    # The launcher's side

    def begin(self, row: int, pid: int) -> None:
        """A process begins."""
        self._set(row, _PID, pid)

    def end(self, row: int) -> None:
        self._set(row, _PID, 0)

    def has_session(self, row: int) -> bool:
        return self._get(row, _SESSIONS) > 0

    def own_steps(self, row: int) -> int:
        """Steps of the process's own optimizer, before it made a session."""
        return self._get(row, _OWN_STEPS)

    # The side of a process with this row

    def note_session(self, row: int) -> None:
        self._set(row, _SESSIONS, 1)

    def note_own_steps(self, row: int, steps: int) -> None:
        self._set(row, _OWN_STEPS, steps)

    @contextmanager
    def turn(self, row: int, number: int) -> Iterator[None]:
        """For the `number`-th time in this process: the first process of the host goes first, the others then."""
        while self._waits(row, number):
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            self._set(row, _TURNS, number)

    def _waits(self, row: int, number: int) -> bool:
        first = next((other for other in range(row) if self._get(other, _PID)), row)
        return first != row and self._get(first, _TURNS) < number


def own() -> tuple[HostPage, int] | None:
    """The page and the row of this process, where a launcher of ours has started it."""
    if FD not in os.environ:
        return None
    return HostPage(int(os.environ[FD])), int(os.environ[ROW])
