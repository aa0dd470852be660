"""A file of records is kept short: older step lines become fewer, events stay.

The newest `FULL` steps keep all their lines. Of those that are as old again every second line stays, of those twice as
old every fourth, and so on: a billion steps leave fewer than 80,000 lines. Which steps stay follows from their numbers,
so the files of all workers keep the same ones. Lines of which a process writes one a second are thinned alike, by their
age in seconds.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from manyhands.foreign.regular import not_through_links, open_regular
from manyhands.telemetry import lines

FULL = 4096
GROWTH_BYTES = 16 << 20
"""By how much a file grows before it is thinned again."""
SLICE_S = 0.002
"""How long thinning may keep the interpreter from a training step at once."""

_TAIL_BYTES = 1 << 16
_BEGINNING = re.compile(
    rb'\{"kind":"(step|log|layers|classes|process|updates|serving|usage)","t":([0-9.e+]+),"rank":-?\d+(?:,"step":(\d+))?'
)


def stride(age: float) -> int:
    """Of how many lines of this age one stays."""
    return 1 << max(0, (int(age) // FULL).bit_length() - 1)


class Thinning:
    """Writes a thinned copy beside a file, a little at a time, and puts it in the file's place when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy_path = path.with_suffix(".thinned")
        self._source = open_regular(path)
        try:
            newest_step, newest_t = _newest(self._source)
            self._rule = _KeptLines(newest_step, newest_t)
            self._copy_path.unlink(missing_ok=True)
            self._copy = open(self._copy_path, "ab", buffering=0, opener=not_through_links)  # noqa: SIM115
        except OSError:
            self._source.close()
            raise

    def work(self) -> bool:
        """Copy for a moment; says whether it has come to the end of the file."""
        until_s, kept = time.perf_counter() + SLICE_S, list[bytes]()
        while line := self._source.readline():
            kept += self._rule.kept(line)
            if time.perf_counter() > until_s:
                break
        self._write(kept)
        return not line

    def replace(self) -> FileIO:
        """The thinned file, to append to; nothing may have been appended to the old one since the end was reached."""
        self._write(self._rule.rest())
        os.replace(self._copy_path, self._path)
        self._source.close()
        return self._copy

    def abandon(self) -> None:
        """Leave the file as it is."""
        self.forget()
        self._copy_path.unlink(missing_ok=True)

    def forget(self) -> None:
        """In a forked child, whose parent goes on with it."""
        self._source.close()
        self._copy.close()

    def _write(self, kept: Iterable[bytes]) -> None:
        rest = memoryview(b"".join(kept))
        while rest:
            rest = rest[self._copy.write(rest) :]


def _newest(source: BinaryIO) -> tuple[int, float]:
    """The highest step and the latest time of the last lines; leaves the file at its beginning."""
    source.seek(max(0, source.seek(0, os.SEEK_END) - _TAIL_BYTES))
    found = [match for line in source.readlines() if (match := _BEGINNING.match(line))]
    source.seek(0)
    steps = [int(match[3]) for match in found if match[3]]
    return max(steps, default=0), max((float(match[2]) for match in found), default=0.0)


class _KeptLines:
    """Which lines stay, told one after the other."""

    def __init__(self, newest_step: int, newest_t: float) -> None:
        self._newest_step = newest_step
        self._newest_t = newest_t
        self._last_t: dict[bytes, float] = {}
        self._last_logged: dict[tuple[str, ...], int] = {}
        self._dropped = _Dropped()

    def kept(self, line: bytes) -> Iterator[bytes]:
        match = _BEGINNING.match(line)
        if match is None:
            yield line  # an event
        elif match[3] is None:
            yield from self._of_a_second(match[1], float(match[2]), line)
        elif match[1] == b"step":
            if int(match[3]) % stride(self._newest_step - int(match[3])) == 0:
                yield line
        elif self._stays_logged(int(match[3]), line):
            yield line

    def rest(self) -> Iterator[bytes]:
        yield from self._dropped.take(None)

    def _of_a_second(self, kind: bytes, t: float, line: bytes) -> Iterator[bytes]:
        """Usage of the process is what it is at that time; updates are counts, which add up."""
        between = stride(self._newest_t - t)
        stays = between == 1 or t - self._last_t.get(kind, 0.0) >= between
        if stays:
            self._last_t[kind] = t
        if kind == b"updates":
            if not stays:
                self._dropped.add(line)
                return
            yield from self._dropped.take(line)
        elif stays:
            yield line

    def _stays_logged(self, step: int, line: bytes) -> bool:
        """What a script logs now and then stays longer than what it logs at every step."""
        between = stride(self._newest_step - step)
        if between == 1:
            return True
        values = (lines.decode(line) or {}).get("values")
        names = tuple(sorted(values)) if isinstance(values, dict) else (line[:18].decode("ascii", "replace"),)
        last = self._last_logged.get(names)
        if step % between and last is not None and abs(step - last) < between:
            return False
        self._last_logged[names] = step
        return True


class _Dropped:
    """Counts of lines that did not stay, for the next one that does."""

    def __init__(self) -> None:
        self._last: lines.Record = {}
        self._sums: dict[str, Counter[str]] = {}

    def add(self, line: bytes) -> None:
        self._last = lines.decode(line) or self._last
        for name, counts in self._last.items():
            if isinstance(counts, dict):
                self._sums.setdefault(name, Counter()).update(counts)

    def take(self, line: bytes | None) -> Iterator[bytes]:
        """The line with these counts; without a line, one of its own if there are any."""
        if not self._sums:
            if line is not None:
                yield line
            return
        if line is not None:
            self.add(line)
        yield lines.encode({**self._last, **self._sums})
        self._sums = {}
