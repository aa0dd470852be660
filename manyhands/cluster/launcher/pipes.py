"""The pipes between the launcher and one process: standard output and error, the permission to begin, and its stack."""

import contextlib
import os

from manyhands.cluster.fork_server.spawn_request import GO

_READ_BYTES = 1 << 16


class WorkerPipes:
    """Both ends of a process's pipes, until the process has its own ends and a `Child` has the launcher's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.output, self.their_output = os.pipe()
        self.error, self.their_error = os.pipe()
        self.their_permission, self.permission = os.pipe()
        self.stack, self.their_stack = os.pipe()
        self._ours = {self.output, self.error, self.permission, self.stack}
        self._theirs = {self.their_output, self.their_error, self.their_permission, self.their_stack}

    def __enter__(self) -> "WorkerPipes":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def hand_over(self) -> None:
        """Let the process begin; from now on its `Child` closes the launcher's ends."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.permission, GO)
        self._ours = {self.permission}
        self.close()

    def close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    def close(self) -> None:
        self.close_theirs()
        while self._ours:
            os.close(self._ours.pop())


class LinePipe:
    """The launcher's end of an output pipe, cut into lines."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> list[str] | None:
        """The lines that have come; None if there is nothing to read, now or ever."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _READ_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return [shown(line) for line in lines]

    def read_all(self) -> list[str]:
        """Everything that an ended process has left in the pipe, with a last line that has no end."""
        lines: list[str] = []
        # A pipe holds at most 1 MB by default; the launcher does not wait for a grandchild that goes on writing.
        for _ in range(16):
            new = self.read()
            if new is None:
                break
            lines += new
        return [*lines, shown(self._rest)] if self._rest else lines


def shown(line: bytes) -> str:
    """What a terminal would still show of a line that a progress bar has written over and over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
