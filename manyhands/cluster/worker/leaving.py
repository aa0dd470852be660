"""Being asked to leave: before a machine is taken away, schedulers send SIGTERM and wait a little.

A worker that has a session then finishes its step, saves together with the others, and leaves. One that has none, or is
told a second time, ends at once. Our launcher passes SIGTERM on as SIGUSR2, which may come as often as it likes: some
schedulers signal every process of a job, and the launcher's word must not count as the second time. To end a worker at
once the launcher says SIGHUP.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from manyhands.cluster.launchers import local

_is_installed = False  # whether this process hears signals
_is_heard = False  # whether a session looks
is_asked = False  # whether this process is to save and leave
_times = 0  # that this process was told to end


def install(end: Callable[[], None]) -> None:
    """From now on signals do what is said above; `end` ends this process at once."""
    global _is_installed
    _is_installed = True

    def hear(number: int, frame: FrameType | None) -> None:
        _hear(number, end)

    signal.signal(signal.SIGTERM, hear)
    signal.signal(local.ASK, hear)
    if local.RANK in os.environ:
        signal.signal(local.END, lambda number, frame: end())


def listen() -> None:
    """A session looks whether this process was asked to leave; only the main thread gets signals."""
    global _is_heard
    if threading.current_thread() is not threading.main_thread():
        return
    _is_heard = True
    if not _is_installed and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        install(_die)


def stop_listening() -> None:
    """No session looks any more: from now on SIGTERM ends this process at once."""
    global _is_heard
    _is_heard = False


def _hear(number: int, end: Callable[[], None]) -> None:
    global is_asked, _times
    _times += number == signal.SIGTERM
    if not _is_heard or _times > 1:
        end()
    is_asked = True


def _die() -> None:
    """End as a process without a session does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
