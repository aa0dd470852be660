"""Reading the records of a run, while it goes on or afterwards."""

import heapq
from collections.abc import Iterator
from pathlib import Path

from manyhands.foreign.regular import open_regular
from manyhands.telemetry.lines import Record, decode

CHUNK_BYTES = 4 << 20
LONGEST_LINE = 16 << 20


def read(run: Path) -> Iterator[Record]:
    """All records of a run in the order of their times; damaged lines are left out."""
    return heapq.merge(*(_records_of(path) for path in _files_of(run)), key=_time_of)


class Tail:
    """New records of all processes of a run, at each `poll`.

    A line that is still being written waits for the next poll; `damaged` counts lines that were no record.
    """

    def __init__(self, run: Path, *, skip_existing: bool = False) -> None:
        self.damaged = 0
        self._run = run
        self._offsets: dict[Path, int] = {}
        if skip_existing:
            self._offsets = {path: path.stat().st_size for path in _files_of(run)}

    def poll(self) -> list[Record]:
        """The complete records that came since the last poll, in the order of their times.

        At most a few megabytes of each file at once, so that catching up with a long run stays responsive.
        """
        records: list[Record] = []
        for path in _files_of(self._run):
            for line in self._new_lines(path):
                record = decode(line)
                if record is None:
                    self.damaged += 1
                else:
                    records.append(record)
        records.sort(key=_time_of)
        return records

    def _new_lines(self, path: Path) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        try:
            size = path.stat().st_size
            if size < offset:  # a process began the file again
                offset = 0
            if size == offset:
                return []
            with open_regular(path) as file:
                file.seek(offset)
                data = file.read(CHUNK_BYTES)
                if b"\n" not in data:
                    data += file.readline(
                        LONGEST_LINE
                    )  # a line longer than the chunk must not hold up the rest
        except OSError:  # removed since it was listed
            return []
        # What has no end by now is no record: it is passed over piece by piece.
        complete = data if len(data) > LONGEST_LINE else data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(complete)
        return [line for line in complete.split(b"\n") if line]


def _files_of(run: Path) -> list[Path]:
    return sorted((run / "events").glob("*.jsonl"))


def _records_of(path: Path) -> Iterator[Record]:
    try:
        file = open_regular(path)
    except OSError:  # removed since it was listed, or no file
        return
    with file:
        while line := file.readline(LONGEST_LINE):
            record = decode(line)
            if record is not None:
                yield record


def _time_of(record: Record) -> float:
    return float(record["t"])
