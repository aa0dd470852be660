"""The file of one process's records: lines are appended, and older ones become fewer now and then."""

import builtins
import os
import sys
from pathlib import Path

from manyhands.errors import UsageError
from manyhands.foreign.regular import not_through_links, open_regular
from manyhands.telemetry.thinning import GROWTH_BYTES, Thinning


class RecordLog:
    """Appends to the file at `path`. No error of the disk gets out of it once it is open: records are lost, and the
    process says so once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lost = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = _ends_within_a_line(path)
            self._file = builtins.open(path, "ab", buffering=0, opener=not_through_links)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"cannot write the run's records to {path}: {error.strerror}") from error
        self._room = GROWTH_BYTES - os.fstat(self._file.fileno()).st_size  # until older lines are thinned
        self._thinning: Thinning | None = None

    def append(self, data: bytes, records: int, unwritable: int = 0) -> None:
        """Write whole lines of so many records; so many more could not be written as lines."""
        lost = unwritable
        try:
            if data and self._torn:
                data = b"\n" + data
            self._room -= len(data)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
                self._torn = bool(rest)
        except OSError as error:
            lost = records
            self._torn = True
            if not self._lost:
                print(f"telemetry: cannot write {self._path}: {error}; records are lost", file=sys.stderr)
        self._lost += lost

    @property
    def is_thinning(self) -> bool:
        """Whether `tend` has work to go on with."""
        return self._thinning is not None

    def tend(self) -> None:
        """Keep the file short, a few milliseconds of work at once; what is appended meanwhile goes into the old file,
        and so into its copy."""
        if self._thinning is None and self._room >= 0:
            return
        try:
            if self._thinning is None:
                self._room = GROWTH_BYTES
                self._thinning = Thinning(self._path)
            if not self._thinning.work():
                return
            thinned = self._thinning.replace()
            self._file.close()
            self._file = thinned
        except OSError:  # no room for a copy: the file goes on as it is
            if self._thinning:
                self._thinning.abandon()
        self._thinning = None

    def close(self) -> None:
        if self._thinning:
            self._thinning.abandon()
        self._file.close()

    def forget(self) -> None:
        """In a forked child: the records are the parent's to write."""
        self._file.close()
        if self._thinning:
            self._thinning.forget()


def _ends_within_a_line(path: Path) -> bool:
    """Whether a process was killed in the middle of a line that would swallow our first one."""
    try:
        with open_regular(path) as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
