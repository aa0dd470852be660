"""What the kernel says of a process, without asking it: whether it hangs, computes, or can be asked anything.

A worker that is not heard of need not hang: a call into C may hold the interpreter's lock for as long as it likes, and
then no thread of the worker can speak. So silence alone condemns no process. One hangs if the kernel has stopped it, or
if one of its threads waits for a disk (or a file system over a network) and the whole process computes nothing.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

STOPPED = "Tt"
_DISK = "D"
_BUSY = 0.2  # of a core


@dataclass(frozen=True)
class KernelView:
    """A process at one moment."""

    at_s: float
    states: str
    """Of all threads, the main one first; empty where the process is gone."""
    cpu_s: float

    @property
    def is_stopped(self) -> bool:
        return self.states[:1] in STOPPED and bool(self.states)

    @property
    def waits_for_a_disk(self) -> bool:
        return _DISK in self.states

    def computes_since(self, before: "KernelView") -> bool:
        """Whether the process has been computing, or its main thread would if it had a core."""
        would = self.states[:1] == before.states[:1] == "R"
        return would or self.cpu_s - before.cpu_s > _BUSY * (self.at_s - before.at_s)


def view(pid: int) -> KernelView:
    """Threads and CPU time of a process that the launcher has not reaped yet."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    states, cpu = "", 0.0
    try:
        fields = _fields(Path(f"/proc/{pid}/stat"))
        states, cpu = fields[0], tick_s * (int(fields[11]) + int(fields[12]))
        for thread in os.listdir(f"/proc/{pid}/task"):
            if thread != str(pid):
                states += _fields(Path(f"/proc/{pid}/task/{thread}/stat"))[0]
    except (OSError, IndexError):
        pass  # it has ended, or one of its threads has
    return KernelView(time.monotonic(), states, cpu)


def _fields(stat: Path) -> list[str]:
    return stat.read_text().rpartition(")")[2].split()


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal; else the signal might end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


class Silences:
    """Processes that were not heard of for too long: which of them hang."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._first: dict[int, KernelView] = {}  # by process id: when it was first seen to wait for a disk

    def hangs(self, pid: int) -> bool:
        """Whether the process is stopped, or has waited for a disk and computed nothing for as long again."""
        now = view(pid)
        if now.is_stopped:
            return True
        first = self._first.get(pid)
        if not now.waits_for_a_disk or first is None or now.cpu_s > first.cpu_s:
            self._first.pop(pid, None)
            if now.waits_for_a_disk:
                self._first[pid] = now
            return False
        return now.at_s - first.at_s >= self._stall_s
