"""TensorBoard's event files, without depending on TensorBoard.

A file is a sequence of framed messages: length, masked CRC-32C of the length, message, masked CRC-32C of the
message. A message is an `Event` in protobuf; of its fields these are needed:

    Event      1 wall_time (double)   2 step (varint)   3 file_version (string)   5 summary (Summary)
    Summary    1 value (repeated Value)
    Value      1 tag (string)         2 simple_value (float)   4 image (Image)   5 histo (Histogram)
    Image      1 height (varint)      2 width (varint)         3 colorspace (varint)   4 encoded (PNG)
    Histogram  1 min   2 max   3 num   4 sum   5 sum_squares (doubles)   6 limits   7 counts (packed doubles)
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.foreign.regular import not_through_links

_RGB = 3


@dataclass(frozen=True)
class Histogram:
    """How many of some values lie in each of the equal parts of their range, and their norm."""

    low: float
    high: float
    counts: Sequence[int]
    norm: float

    def encode(self) -> bytes:
        width = (self.high - self.low) / len(self.counts)
        limits = [self.low + width * (place + 1) for place in range(len(self.counts))]
        total = sum(count * (limit - width / 2) for count, limit in zip(self.counts, limits, strict=True))
        numbers = (self.low, self.high, float(sum(self.counts)), total, self.norm**2)
        return (
            b"".join(_double(field, value) for field, value in enumerate(numbers, 1))
            + _bytes(6, struct.pack(f"<{len(limits)}d", *limits))
            + _bytes(7, struct.pack(f"<{len(self.counts)}d", *map(float, self.counts)))
        )


@dataclass(frozen=True)
class Picture:
    """Rows of red, green and blue bytes."""

    width: int
    rows: Sequence[bytes]

    def encode(self) -> bytes:
        numbers = (len(self.rows), self.width, _RGB)
        fields = b"".join(_varint_field(field, value) for field, value in enumerate(numbers, 1))
        return fields + _bytes(4, self.png())

    def png(self) -> bytes:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        header = struct.pack(">IIBBBBB", self.width, len(self.rows), 8, 2, 0, 0, 0)
        lines = b"".join(b"\0" + row for row in self.rows)
        chunks = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


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
        self._summary({tag: _float(2, value) for tag, value in values.items()}, step, wall_time)

    def histograms(self, values: Mapping[str, Histogram], step: int, wall_time: float) -> None:
        """Add one histogram to each of several series."""
        self._summary({tag: _bytes(5, value.encode()) for tag, value in values.items()}, step, wall_time)

    def picture(self, tag: str, value: Picture, step: int, wall_time: float) -> None:
        """Add one picture to a series."""
        self._summary({tag: _bytes(4, value.encode())}, step, wall_time)

    def _summary(self, values: Mapping[str, bytes], step: int, wall_time: float) -> None:
        if not self._started:
            self._started = True
            self._frame(_double(1, wall_time) + _bytes(3, b"brain.Event:2"))
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + value) for tag, value in values.items())
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
