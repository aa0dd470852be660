"""What each process has printed, in a file of its own in the run's directory."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from manyhands.foreign.regular import not_through_links

FOLDER = "logs"


class WorkerLogs:
    """`logs/worker-0.log` and so on, as `name` calls the processes; without a run's directory nothing is written."""

    def __init__(self, run_dir: Path | None, name: Callable[[int], str]) -> None:
        self._folder = run_dir / FOLDER if run_dir else None
        self._name = name
        self._files: dict[int, BinaryIO] = {}

    def __enter__(self) -> "WorkerLogs":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, rank: int, line: str) -> None:
        """A full disk must not end the run."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            if rank not in self._files:
                self._folder.mkdir(exist_ok=True)
                path = self._folder / f"{self._name(rank).replace(' ', '-')}.log"
                self._files[rank] = open(path, "ab", 0, opener=not_through_links)  # noqa: SIM115
            self._files[rank].write(line.encode(errors="replace") + b"\n")

    def end(self, rank: int) -> None:
        """The process has ended."""
        if file := self._files.pop(rank, None):
            file.close()
