"""How many processes a host can take, before any of them starts."""

import os
import resource
from pathlib import Path

from manyhands.comm.transports.free_memory import available_bytes
from manyhands.errors import UsageError

MOST = 4096
"""What the coordinator's messages have room for."""
PROCESS_BYTES = 15 << 20
"""Measured: what a forked worker has of its own (PyTorch, loaded once, is shared) after its first step."""
PER_CORE = 64
"""Beyond that workers hardly ever have a core at the same time, and wait for each other all day."""
_DESCRIPTORS = (
    12  # of the launcher, for each process: its pipes, both ends of them while it starts, and its log
)
_OWN_DESCRIPTORS = 64
_THREADS = 6  # of a worker: PyTorch, ZeroMQ, telemetry


def admit(processes: int, asked: str) -> None:
    """Refuse more processes than this host can hold; `asked` is what the command line says."""
    cores = len(os.sched_getaffinity(0))
    limits = {
        f"{PER_CORE} for each core": PER_CORE * cores,
        "what a run has room for": MOST,
        f"{available_bytes() / 1e9:.1f} GB of free memory": available_bytes() // PROCESS_BYTES,
        f"{_descriptors():,} open files per process": (_descriptors() - _OWN_DESCRIPTORS) // _DESCRIPTORS,
        f"{_tasks():,} more threads": _tasks() // _THREADS,
    }
    why = min(limits, key=limits.__getitem__)
    most = max(1, limits[why])
    if processes > most:
        raise UsageError(
            f"{asked}: this host has {cores} cores, and at most {most:,} processes fit ({why}); "
            f"one worker per core is usually fastest, use --workers {min(cores, most)}"
        )


def raise_descriptor_limit() -> None:
    """The launcher has some descriptors for each process; the soft limit is there for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _descriptors()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _descriptors() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _OWN_DESCRIPTORS + _DESCRIPTORS * MOST
    return enough if hard == resource.RLIM_INFINITY else min(hard, enough)


def _tasks() -> int:
    """How many threads may still begin here."""
    limits = [int(Path("/proc/sys/kernel/pid_max").read_text()) - _running()]
    group = Path("/sys/fs/cgroup/pids.max")
    if group.exists() and (most := group.read_text().strip()).isdigit():
        limits.append(int(most) - int(group.with_name("pids.current").read_text()))
    return max(0, min(limits))


def _running() -> int:
    """Threads that exist now."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
