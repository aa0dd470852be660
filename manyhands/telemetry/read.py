"""Reading the records of a run, while it goes on or afterwards."""

import heapq
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from manyhands.foreign.regular import open_regular
from manyhands.telemetry.lines import Record, decode

CHUNK_BYTES = 4 << 20
LONGEST_LINE = 16 << 20
SEARCH_BYTES = 1 << 16

_CLOCK_TICK_NS = 1_000_000_000


def read(run: Path) -> Iterator[Record]:
    """All records of a run in the order of their times; damaged lines are left out."""
    return heapq.merge(*(_records_of(path) for path in _files_of(run)), key=_time_of)


def read_ends(run: Path, most_bytes: int) -> Iterator[Record]:
    """As `read`, but of each file only how it begins and how it ends, so that all together are about so long."""
    files = _files_of(run)
    each = max(most_bytes // max(len(files), 1), SEARCH_BYTES)
    return heapq.merge(*(_records_of(path, each) for path in files), key=_time_of)


class Tail:
    """New records of all processes of a run, at each `poll`.

    A line that is still being written waits for the next poll; `damaged` counts lines that were no record. Where a
    process has put a thinned file in the place of its old one, the poll goes on after the last record that it gave.
    """

    def __init__(self, run: Path, *, skip_existing: bool = False) -> None:
        self.damaged = 0
        self.is_behind = False
        """Whether the last poll has left something unread, since it had enough."""
        self._folder = _Folder(run / "events")
        self._next = 0  # the file that a poll begins with, so that a run of many files is read evenly
        self._places: dict[str, _FilePosition] = {}
        for path in self._folder.files() if skip_existing else ():
            status = os.stat(path)
            self._places[path] = _FilePosition(status.st_ino, status.st_size, time.time())

    def poll(self, most_bytes: int | None = None) -> list[Record]:
        """The complete records that came since the last poll, in the order of their times.

        At most a few megabytes of each file at once, and about `most_bytes` of all files, so that catching up with a
        long run stays responsive.
        """
        records: list[Record] = []
        left = math.inf if most_bytes is None else most_bytes
        paths = self._folder.files()
        first, self.is_behind = self._next % max(len(paths), 1), False
        for number, path in enumerate(paths[first:] + paths[:first]):
            if left <= 0:
                self._next, self.is_behind = first + number, True
                break
            place = self._places.setdefault(path, _FilePosition())
            for line in self._new_lines(path, place):
                left -= len(line)
                record = decode(line)
                if record is None:
                    self.damaged += 1
                else:
                    records.append(record)
                    place.last_t = max(place.last_t, _time_of(record))
            self.is_behind |= place.is_behind
        records.sort(key=_time_of)
        return records

    def _new_lines(self, path: str, place: "_FilePosition") -> list[bytes]:
        place.is_behind = False
        try:
            status = os.stat(path)
            if status.st_size < place.offset and status.st_ino == place.inode:
                place.offset = 0  # a process began the file again
            if status.st_size == place.offset and status.st_ino == place.inode:
                return []
            with open_regular(Path(path)) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != place.inode:
                    place.offset = _offset_after(file, found.st_size, place.last_t)
                    place.inode = found.st_ino
                file.seek(place.offset)
                data = file.read(CHUNK_BYTES)
                if b"\n" not in data:
                    data += file.readline(
                        LONGEST_LINE
                    )  # a line longer than the chunk must not hold up the rest
        except OSError:  # removed since it was listed
            return []
        # What has no end by now is no record: it is passed over piece by piece.
        complete = data if len(data) > LONGEST_LINE else data[: data.rfind(b"\n") + 1]
        place.offset += len(complete)
        place.is_behind = len(data) >= CHUNK_BYTES
        return [line for line in complete.split(b"\n") if line]


class _Folder:
    """The files of a run's records, listed again only when the folder has changed."""

    def __init__(self, place: Path) -> None:
        self._place = str(place)
        self._changed_ns = -1
        self._files: list[str] = []

    def files(self) -> list[str]:
        try:
            changed_ns = os.stat(self._place).st_mtime_ns
            if changed_ns != self._changed_ns:
                with os.scandir(self._place) as entries:
                    self._files = sorted(entry.path for entry in entries if entry.name.endswith(".jsonl"))
                # A file that comes within the same tick of the clock leaves no trace in the folder's time.
                settled = time.time_ns() - changed_ns > _CLOCK_TICK_NS
                self._changed_ns = changed_ns if settled else -1
        except OSError:  # not there yet, or not any more
            self._files, self._changed_ns = [], -1
        return self._files


@dataclass
class _FilePosition:
    """How far a file has been read: which one it was, where, the latest time of its records, and if there is more."""

    inode: int = -1
    offset: int = 0
    last_t: float = -math.inf
    is_behind: bool = False


def _offset_after(file: BinaryIO, size: int, t: float) -> int:
    """Where the first record after this time begins, in a file whose records are in the order of their times."""
    low, high = 0, size if t > -math.inf else 0
    while high - low > SEARCH_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline(LONGEST_LINE)  # the middle of a line, most likely
        record = decode(file.readline(LONGEST_LINE))
        low, high = (middle, high) if record is None or _time_of(record) <= t else (low, middle)
    file.seek(low)
    if low:
        low += len(file.readline(LONGEST_LINE))
    while low < high and (line := file.readline(LONGEST_LINE)):
        record = decode(line)
        if record is not None and _time_of(record) > t:
            break
        low += len(line)
    return low


def _files_of(run: Path) -> list[Path]:
    return sorted((run / "events").glob("*.jsonl"))


def _records_of(path: Path, most_bytes: int | None = None) -> Iterator[Record]:
    try:
        file = open_regular(path)
    except OSError:  # removed since it was listed, or no file
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        leaps = most_bytes is not None and size > most_bytes + SEARCH_BYTES
        while line := file.readline(LONGEST_LINE):
            record = decode(line)
            if record is not None:
                yield record
            if leaps and most_bytes is not None and file.tell() > SEARCH_BYTES:
                leaps = False
                file.seek(size - most_bytes)
                file.readline(LONGEST_LINE)  # the middle of a line


def _time_of(record: Record) -> float:
    return float(record["t"])
