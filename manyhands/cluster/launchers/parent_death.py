"""Lets a process that the launcher has started die with it, however the launcher ended."""

import ctypes
import os
import signal

from manyhands.cluster.launchers import local

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_the_launcher(name: str | None) -> None:
    """Have the kernel kill this process when the launcher ends; `top` shows the process as `name`."""
    if name:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    launcher = os.environ.get(local.LAUNCHER_PID)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
