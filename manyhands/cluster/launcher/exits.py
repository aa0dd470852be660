"""How a process ended, in words."""

import signal
from collections.abc import Sequence

from manyhands.cluster.launchers import local


def describe_exit(code: int) -> str:
    """An exit code of `subprocess` (negative for a signal) in words."""
    if code == local.EXIT_TERMINATED:
        return "told to end by SIGTERM (exit code 143)"
    if code == local.EXIT_PEER_LOST:
        return "it lost another worker (exit code 70)"
    if code == local.EXIT_LEFT:
        return "it was asked to leave (exit code 71)"
    if code == local.EXIT_SAVED:
        return "it was asked to save and leave (exit code 75)"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    meaning = {
        "SIGSEGV": "segmentation fault",
        "SIGBUS": "bus error",
        "SIGABRT": "aborted",
        "SIGILL": "illegal instruction",
        "SIGFPE": "arithmetic fault",
    }.get(name)
    return f"{meaning} ({name})" if meaning else f"killed by {name}"


def ending(code: int, exit_report: Sequence[str]) -> str:
    """How one has ended, given what it said at its end: `ended with` and its exception, or `died:` and its code."""
    exception = _exception_in(exit_report) if code == local.EXIT_CRASHED else None
    return f"ended with {exception}" if exception else f"died: {describe_exit(code)}"


def _exception_in(traceback: Sequence[str]) -> str | None:
    """The line of a traceback that names the exception: the first after the frames; its message may be longer."""
    frames = [number for number, line in enumerate(traceback) if line.startswith("  File ")]
    after = list(traceback)[frames[-1] + 1 :] if frames else []
    return next((line for line in after if line and not line.startswith(" ")), None)
