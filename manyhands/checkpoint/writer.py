"""The process that writes one checkpoint while training goes on.

It finds a copy of the state in memory that it shares with the worker that started it. It has no torch and nothing of
that worker's interpreter, and takes little but the time that the workers leave on any of the run's cores.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec

from manyhands.checkpoint.disk import REAL_DISK, Disk
from manyhands.checkpoint.publish import put
from manyhands.cluster.launchers import local
from manyhands.errors import CheckpointError

PIECE_BYTES = 8 * 2**20

_PR_SET_PDEATHSIG = 1
_NICENESS = 10  # a tenth of a busy core: at 19, 240 MB took 11 s beside two busy workers


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to write, and as what."""

    fd: int
    start: int  # in that memory, in bytes
    sizes: dict[str, int]  # bytes of each file, in the order in which they lie there
    step: int
    keep: int
    parent: int  # the process id of the worker


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    error: str = ""
    warnings: list[str] = []


def write(job: Job, directory: Path, *, disk: Disk = REAL_DISK) -> Result:
    """Put the copy on the disk; whatever goes wrong is told, not raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            memory = memoryview(
                mmap.mmap(job.fd, sum(job.sizes.values()), prot=mmap.PROT_READ, offset=job.start)
            )
            ends = dict(zip(job.sizes, _ends(job.sizes), strict=True))
            files = {name: _pieces(memory[end - job.sizes[name] : end]) for name, end in ends.items()}
            put(directory, step=job.step, files=files, keep=job.keep, disk=disk)
        except CheckpointError as error:
            return Result(error=str(error))
    return Result(warnings=[str(warning.message) for warning in caught])


def _ends(sizes: dict[str, int]) -> Iterator[int]:
    end = 0
    for size in sizes.values():
        end += size
        yield end


def _pieces(content: memoryview) -> Iterator[memoryview]:
    return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _be_modest() -> None:
    """Give way to the workers, and do not stay on the core that belongs to our own."""
    os.nice(_NICENESS)
    launcher = os.environ.get(local.LAUNCHER_PID)
    if launcher:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(int(launcher)))


def _die_with_the_worker(pid: int) -> None:
    """A run that goes on from an older checkpoint must not find a newer one there later."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Write what the arguments say, a `Job` and a directory; the `Result` is all that goes to standard output."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    _die_with_the_worker(job.parent)
    _be_modest()
    for number in (signal.SIGINT, signal.SIGTERM):  # to a whole job: they are the worker's to answer
        signal.signal(number, signal.SIG_IGN)
    result = write(job, Path(sys.argv[2]))
    sys.stdout.buffer.write(msgspec.json.encode(result))
