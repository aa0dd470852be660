"""One process that the launcher has started, as the launcher sees it."""

import contextlib
import os
import signal
from collections import deque

from manyhands.cluster.launcher.exits import ending
from manyhands.cluster.launcher.pipes import LinePipe, WorkerPipes
from manyhands.cluster.launchers import local

TAIL_LINES = 40
_EXIT_REPORT_LINES = 1000  # the launcher shows a traceback whole


class Child:
    """A worker or a server: its descriptors, its exit code and its last lines on standard error."""

    def __init__(self, pid: int, pipes: WorkerPipes) -> None:
        self.rank = pipes.rank
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.code = 0
        """As in `subprocess`: negative for a signal. Known once the process has ended."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.reported_code: int | None = None
        """The exit code that its exit report names; None before the report. From then on `tail` is the report."""
        self.output, self.error = LinePipe(pipes.output), LinePipe(pipes.error)

    @property
    def ending(self) -> str:
        """How it has ended, in words."""
        return ending(self.code, self.tail if self.reported_code is not None else ())

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.pidfd, self.output.fd, self.error.fd)

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill_group(self) -> None:
        """Kill the process and all that it has started; only before it is reaped, while the group is its own."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def hear_error(self, line: str) -> str | None:
        """Keep a line of standard error; returns what of it the launcher should show now."""
        before, mark, code = line.partition(local.EXIT_REPORT)
        if mark and code.isdecimal():
            self.reported_code = int(code)
            self.tail = deque(maxlen=_EXIT_REPORT_LINES)
            return before or None  # a progress bar, for example, does not end its line
        self.tail.append(line)
        return line if self.reported_code is None else None

    def reap(self) -> None:
        """Close the descriptors and take the exit code of a process that has ended."""
        for fd in self.descriptors:
            os.close(fd)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.code < 0 and self.reported_code is not None:
            self.code = self.reported_code  # a signal came while it was ending by itself
