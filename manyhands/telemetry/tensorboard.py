"""TensorBoard event files, for those who live there, without depending on TensorBoard.

A file is a sequence of framed messages: length, masked CRC-32C of the length, message, masked CRC-32C of the
message. A message is an `Event` in protobuf; of its fields these are needed:

    Event    1 wall_time (double)   2 step (varint)   3 file_version (string)   5 summary (Summary)
    Summary  1 value (repeated Value)
    Value    1 tag (string)         2 simple_value (float)
"""

import bisect
import os
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.errors import UsageError
from manyhands.foreign.regular import not_through_links
from manyhands.telemetry.lines import Record, number
from manyhands.telemetry.read import read


def export(run: Path) -> Path:
    """Write the scalars of a run to `run/tensorboard`, replacing an earlier export; returns the file."""
    records = read(run)
    first = next(records, None)
    if first is None:
        raise UsageError(
            f"{run} has no records under events/; is it the directory of a run that has started?"
        )
    folder = run / "tensorboard"
    folder.mkdir(exist_ok=True)
    path = folder / f"events.out.tfevents.{int(first['t']) % 10**12}.manyhands"
    unfinished = folder / "export.unfinished"
    with EventWriter(unfinished) as writer:
        scalars = Scalars(writer)
        scalars.add(first)
        for record in records:
            scalars.add(record)
        scalars.finish()
    os.replace(unfinished, path)
    return path


_PLACES = ("t", "rank", "step", "epoch")  # of a record; the rest is what it says
_LATE_STEPS = 8  # that the records of one worker may come after those of another one


class Scalars:
    """Turns records into scalars as they come, so that it serves an export and a live run alike.

    One point per step for all workers together: bytes and samples are sums over workers, the loss is the mean
    over samples, everything else the mean over workers. A step is written when every worker has reported it.
    """

    def __init__(self, writer: "EventWriter") -> None:
        self._writer = writer
        self._workers = 1
        self._last: dict[int, tuple[float, int]] = {}  # of every rank: when it has ended which step
        self._gaps: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._steps: dict[int, _Step] = {}
        self._evaluated: int | None = None
        self._logged: dict[int, _Step] = {}

    def add(self, record: Record) -> None:
        """Take one record of any kind."""
        kind, step = record["kind"], record.get("step")
        if kind == "start":
            workers = record.get("workers")
            self._workers = workers if isinstance(workers, int) else self._workers
            self._last[record["rank"]] = (record["t"], -1)
        elif kind == "step" and isinstance(step, int):
            self._add_step(step, record)
        elif kind == "evaluate" and isinstance(step, int) and step != self._evaluated:
            self._evaluated = step  # every worker may report the same result
            found = {
                f"evaluate/{name}": number(field) for name, field in record.items() if name not in _PLACES
            }
            values = {tag: value for tag, value in found.items() if value is not None}
            self._writer.scalars(values, step, record["t"])
        elif kind == "log" and isinstance(step, int):
            self._add_logged(step, record)

    def finish(self) -> None:
        """Write the steps that some worker never reported, but for those that are thinned out of its records."""
        for gaps in self._gaps.values():
            gaps.sort()
        for step in sorted(self._steps):
            if not self._is_thinned(step):
                self._write(step, self._steps[step])
        self._steps.clear()
        self._write_logged(None)

    def _add_step(self, step: int, record: Record) -> None:
        rank, t = record["rank"], record["t"]
        entry = self._steps.setdefault(step, _Step())
        entry.reports += 1
        entry.t = t
        for name, field in record.items():
            value = number(field)
            if value is not None and name not in ("t", "rank", "step", "loss"):
                entry.sums[_tag_of(name)] += value
        loss, samples = number(record.get("loss")), number(record.get("samples"), 0)
        if loss is not None and samples > 0:
            entry.loss_sum += loss * samples
            entry.loss_samples += samples
        last_t, last = self._last.get(rank, (t, -1))
        self._last[rank] = (t, step)
        steps = step - last if last >= 0 and step > last else 1  # more than one in records that are thinned
        if steps > 1:
            self._gaps[rank].append((last, step))
        if t > last_t:
            entry.sums["samples_per_second"] += samples * steps / (t - last_t)
        if entry.reports >= self._workers:
            self._write(step, self._steps.pop(step))

    def _is_thinned(self, step: int) -> bool:
        """Whether some worker has reported steps before and after this one, and not this one."""
        for gaps in self._gaps.values():
            at = bisect.bisect_left(gaps, (step, 0)) - 1
            if at >= 0 and gaps[at][0] < step < gaps[at][1]:
                return True
        return False

    def _add_logged(self, step: int, record: Record) -> None:
        """Not every worker need log: what was logged at a step is written when the next step's follows."""
        if step not in self._logged:
            self._write_logged(step)
        entry = self._logged.setdefault(step, _Step())
        entry.t = record["t"]
        values = record.get("values")
        for name, field in values.items() if isinstance(values, dict) else ():
            value = number(field)
            if value is not None:
                entry.sums[str(name)] += value
                entry.counts[str(name)] += 1

    def _write_logged(self, before: int | None) -> None:
        for step in sorted(self._logged):
            if before is None or step < before - _LATE_STEPS:
                entry = self._logged.pop(step)
                values = {name: total / entry.counts[name] for name, total in entry.sums.items()}
                self._writer.scalars(values, step, entry.t)

    def _write(self, step: int, entry: "_Step") -> None:
        values = {
            tag: total if tag.startswith(("bytes/", "samples")) else total / entry.reports
            for tag, total in entry.sums.items()
        }
        if entry.loss_samples:
            values["loss"] = entry.loss_sum / entry.loss_samples
        self._writer.scalars(values, step, entry.t)


class _Step:
    """What the workers have reported of one step so far."""

    __slots__ = ("counts", "loss_samples", "loss_sum", "reports", "sums", "t")

    def __init__(self) -> None:
        self.reports = 0
        self.t = 0.0
        self.loss_sum = 0.0
        self.loss_samples = 0.0
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, int] = defaultdict(int)


def _tag_of(name: str) -> str:
    """TensorBoard groups tags by what stands before the slash."""
    if name.endswith("_s"):
        return f"seconds/{name.removesuffix('_s')}"
    return f"bytes/{name.removeprefix('bytes_')}" if name.startswith("bytes_") else name


class EventWriter:
    """Appends scalars to one event file; TensorBoard finds files with `tfevents` in their name."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb", opener=not_through_links)  # noqa: SIM115
        self._started = False

    def scalar(self, tag: str, value: float, step: int, wall_time: float) -> None:
        """Add one point of one curve."""
        self.scalars({tag: value}, step, wall_time)

    def scalars(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        """Add one point to each of several curves."""
        if not self._started:
            self._started = True
            self._frame(_double(1, wall_time) + _bytes(3, b"brain.Event:2"))
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
        )
        self._frame(_double(1, wall_time) + _varint_field(2, step) + _bytes(5, summary))

    def flush(self) -> None:
        """Make everything so far visible to a TensorBoard that is watching."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _frame(self, message: bytes) -> None:
        length = struct.pack("<Q", len(message))
        self._file.write(length + _masked_crc(length) + message + _masked_crc(message))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # a finite double beyond what a float can hold
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _crc_table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli), reflected, one entry per byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def _crc32c(data: bytes) -> int:
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    """Masked as TFRecord wants it: rotated by 15 bits, plus a constant."""
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
