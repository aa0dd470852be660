"""A disk on which the writing process kills itself, for real, at a chosen operation; and a process that forks writers.

python -m tests.faults.killing reads lines `directory content tensors_bytes record_bytes step keep at half` and answers
each with the exit code of a process that wrote that checkpoint, and how many operations it made if it was not killed.
It has no torch, so that a process is a few milliseconds.
"""

import os
import signal
import sys
from pathlib import Path

from manyhands.checkpoint import writer
from manyhands.checkpoint.disk import Chunks, Disk
from manyhands.checkpoint.publish import RECORD, TENSORS


class KillingDisk(Disk):
    """The real disk; before operation number `at`, or in the middle of it if it is a write, the process is killed."""

    def __init__(self, at: int, *, half: bool) -> None:
        self.operations = 0
        self._at = at
        self._half = half

    def make_directory(self, path: Path) -> None:
        self._operation()
        super().make_directory(path)

    def write(self, path: Path, chunks: Chunks) -> None:
        if self.operations == self._at and self._half:
            content = b"".join(chunks)
            super().write(path, [content[: len(content) // 2]])
        self._operation()
        super().write(path, chunks)

    def sync(self, path: Path) -> None:
        self._operation()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._operation()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._operation()
        super().remove(path)

    def _operation(self) -> None:
        if self.operations == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.operations += 1


def write(line: str) -> None:
    """In a process of its own."""
    directory, content, tensors, record, step, keep, at, half = line.split()
    disk = KillingDisk(int(at), half=half == "half")
    job = writer.Job(
        fd=os.open(content, os.O_RDONLY),
        start=0,
        sizes={TENSORS: int(tensors), RECORD: int(record)},
        step=int(step),
        keep=int(keep),
        parent=os.getppid(),
    )
    result = writer.write(job, Path(directory), disk=disk)
    print(disk.operations, result.error, flush=True)


def main() -> None:
    for line in sys.stdin:
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(tell, 1)
            write(line)
            os._exit(0)
        os.close(tell)
        _, status = os.waitpid(child, 0)
        with open(hear) as said:
            print(os.waitstatus_to_exitcode(status), said.read().strip() or "-", flush=True)


if __name__ == "__main__":
    main()
