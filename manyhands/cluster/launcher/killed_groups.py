"""Kills the process groups of workers, each with all that a worker has started, and leaves no file in /dev/shm.

What Python shares between processes has a name there: semaphores, and memory. A helper of Python's, the resource
tracker, unlinks the names that killed processes have left, once all of them have ended, and then ends itself. It is in
the worker's group as well, so it alone is not killed with the others.

python killed_groups.py GROUP…    the same, when the launcher was killed (`guard.py`)
"""

import contextlib
import os
import select
import signal
import sys
import time

_TRACKER = b"resource_tracker import main"  # in the command line of Python's, and of joblib's
_GRACE_S = 3.0


class KilledGroups:
    """The groups that were killed, with the resource trackers in them that are still at work."""

    def __init__(self) -> None:
        self._trackers: dict[int, int] = {}  # pidfd by process id

    def kill(self, group: int) -> None:
        """Kill all of a group now, but resource trackers; only while no other group can have that number."""
        for pid in [pid for pid, pidfd in self._trackers.items() if _has_ended(pidfd, 0)]:
            os.close(self._trackers.pop(pid))
        killed: set[int] = set()
        while found := {pid for pid in _members(group) if pid not in killed and pid not in self._trackers}:
            trackers = {pid for pid in found if _is_tracker(pid)}
            for pid in trackers:
                with contextlib.suppress(ProcessLookupError):
                    self._trackers[pid] = os.pidfd_open(pid)
            if not trackers and not killed:
                _kill(-group)  # at once
            for pid in found - trackers:
                _kill(pid)  # what it had forked before, the next look finds
            killed |= found

    def finish(self) -> None:
        """Wait for the resource trackers, and kill those that do not end: a process outside of the groups uses them."""
        until_s = time.monotonic() + _GRACE_S
        while self._trackers:
            _, pidfd = self._trackers.popitem()
            if not _has_ended(pidfd, max(0.0, until_s - time.monotonic())):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _members(group: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(int(name)) == group:
                    found.append(int(name))
    return found


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read()
    except OSError:
        return False


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _main() -> None:
    killed = KilledGroups()
    for group in sys.argv[1:]:
        killed.kill(int(group))
    killed.finish()


if __name__ == "__main__":
    _main()
