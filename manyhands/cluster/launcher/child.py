"""One process that the launcher has started, as the launcher sees it."""

import contextlib
import os
import signal
from collections import deque

from manyhands.cluster.launcher.exits import ending
from manyhands.cluster.launcher.killed_groups import KilledGroups
from manyhands.cluster.launcher.pipes import LinePipe, WorkerPipes
from manyhands.cluster.launchers import local

TAIL_LINES = 40
_EXIT_REPORT_LINES = 1000  # the launcher shows a traceback whole


def split_report(line: str) -> tuple[str, int | None]:
    """What was printed before an exit report that begins in this line, and the exit code that it names, if one does."""
    before, mark, code = line.partition(local.EXIT_REPORT)
    return (before, int(code)) if mark and code.isdecimal() else (line, None)


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
        self.stack = LinePipe(pipes.stack)
        """Where it writes its Python stack when it gets the signal `local.WHERE`."""
        self.stack_lines: list[str] = []
        self.is_killed = False
        """Whether the launcher has killed it, with all that it had started."""
        self.last_output: list[str] = []
        self.last_errors: list[str] = []
        """What it had printed by then, and the launcher had not read."""

    @property
    def ending(self) -> str:
        """How it has ended, in words."""
        return ending(self.code, self.tail if self.reported_code is not None else ())

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.pidfd, self.output.fd, self.error.fd, self.stack.fd)

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self, killed: KilledGroups) -> None:
        """Kill the process and all that it has started; only before it is reaped, while the group is its own."""
        self.is_killed = True
        self.last_output, self.last_errors = self.output.read_all(), self.error.read_all()
        self.signal(signal.SIGKILL)
        killed.kill(self.pid)

    def hear_error(self, line: str) -> str | None:
        """Keep a line of standard error; returns what of it the launcher should show now."""
        before, code = split_report(line)
        if code is not None:
            self.reported_code = code
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
