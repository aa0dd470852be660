"""Where the records of an LMDB file are, found without the library, which trusts a file and crashes on a damaged one.

Only what `lmdb_file.py` writes is understood: one table. A file is a row of pages. The first two say where the tree
begins, and the newer one counts. Pages of the tree hold places of nodes; nodes of branches name pages, nodes of leaves
have the keys, and the values or the pages where long values begin. Every number is checked against the size of the
file before it is used, and no page is read twice.
"""

import os
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.errors import DataError
from manyhands.foreign.regular import open_regular

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_HEAD = 16  # bytes of a page before its nodes, or before a long value
_BRANCH, _LEAF = 1, 2
_IN_PAGES = 1  # a value that is too long for its leaf
_DIGITS = 10  # of the number in a key
_POWERS = 10 ** np.arange(_DIGITS - 1, -1, -1, dtype=np.int64)
_LARGEST_PAGE = 1 << 16
_LARGEST_META = 1 << 16

Array = np.ndarray[Any, Any]
Places = tuple[Array, Array]  # where each record begins, and how many bytes it has


class RecordFile:
    """An LMDB file: `meta`, and by part the places of the records `part/0000000000` and so on."""

    def __init__(self, path: Path, parts: tuple[str, ...]) -> None:
        self._path = path
        try:
            file = open_regular(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read as an LMDB file ({error.strerror})") from None
        self._file = file
        weakref.finalize(self, file.close)
        self._size = os.fstat(file.fileno()).st_size
        self._metas: list[tuple[int, int]] = []
        self._found: dict[str, list[tuple[Array, Array, Array]]] = {part: [] for part in parts}
        try:
            self._page_bytes, root = self._begin()
            self._walk(root)
            start, length = self._metas[0] if self._metas else (0, 0)
            self.meta = self.read(start, min(length, _LARGEST_META))
            self.places = {part: self._placed(part) for part in parts}
        except (OSError, ValueError, struct.error) as error:
            raise DataError(f"{path} cannot be read as an LMDB file ({error}); write it again") from None

    def read(self, start: int, length: int) -> bytes:
        """Some bytes of the file; copied, since a mapped file that another process cuts off would end this one."""
        found = os.pread(self._file.fileno(), length, start)
        if len(found) != length:
            raise ValueError(f"it ends after {self._size:,} bytes, before byte {start + length:,}")
        return found

    def _begin(self) -> tuple[int, int | None]:
        """How long a page is, and on which one the tree begins; on none if it is empty."""
        page_bytes = struct.unpack_from("<I", self.read(0, 4 * _HEAD), 40)[0]
        if not 256 <= page_bytes <= _LARGEST_PAGE:
            raise ValueError("it does not begin as one")
        newest = (-1, 0, 0)
        for number in (0, 1):
            head = self.read(number * page_bytes, 152)
            magic, version = struct.unpack_from("<II", head, _HEAD)
            flags, entries, root = struct.unpack_from("<4xH26xQQ", head, 88)
            if magic != _MAGIC or version != _VERSION or flags:
                raise ValueError(f"it does not begin as one of version {_VERSION} with one table")
            newest = max(newest, (struct.unpack_from("<Q", head, 144)[0], entries, root))
        return page_bytes, newest[2] if newest[1] else None

    def _walk(self, root: int | None) -> None:
        """Look at every page of the tree, from left to right."""
        waiting, seen = [] if root is None else [root], set()
        while waiting:
            number = waiting.pop()
            if number in seen or number * self._page_bytes >= self._size:
                raise ValueError(f"its tree leads to page {number}, twice or beyond its end")
            seen.add(number)
            start = number * self._page_bytes
            page = np.frombuffer(self.read(start, self._page_bytes), np.uint8)
            kind, lower = (int(found) for found in page[10:14].view("<u2"))
            if kind not in (_BRANCH, _LEAF) or lower > self._page_bytes or lower <= _HEAD or lower % 2:
                raise ValueError(f"its page {number} is none of a tree")
            nodes = page[_HEAD:lower].view("<u2").astype(np.int64)
            if nodes.max() + 8 > self._page_bytes:
                raise ValueError(f"its page {number} is damaged")
            heads = page[nodes[:, None] + np.arange(8)].view("<u2").astype(np.int64)
            if kind == _BRANCH:
                children = heads[:, 0] | heads[:, 1] << 16 | heads[:, 2] << 32
                waiting.extend(children[::-1].tolist())
            else:
                self._take(page, start, nodes, heads)

    def _take(self, page: Array, start: int, nodes: Array, heads: Array) -> None:
        """The keys and places of a leaf."""
        lengths, flags, key_bytes = heads[:, 0] | heads[:, 1] << 16, heads[:, 2], heads[:, 3]
        values = nodes + 8 + key_bytes
        is_long = flags == _IN_PAGES
        if (flags & ~_IN_PAGES).any() or (values + np.where(is_long, 8, lengths) > len(page)).any():
            raise ValueError("a leaf of its tree is damaged, or of another kind of table")
        starts = start + values
        pages = page[values[is_long][:, None] + np.arange(8)].view("<u8").ravel()
        if (pages > self._size // self._page_bytes).any():
            raise ValueError("a long value lies beyond its end")
        starts[is_long] = pages.astype(np.int64) * self._page_bytes + _HEAD
        if (starts + lengths > self._size).any():
            raise ValueError("a value lies beyond its end")
        for part, found in self._found.items():
            prefix = np.frombuffer(f"{part}/".encode(), np.uint8)
            here = np.flatnonzero(key_bytes == len(prefix) + _DIGITS)
            keys = page[nodes[here][:, None] + 8 + np.arange(len(prefix) + _DIGITS)]
            digits = keys[:, len(prefix) :].astype(np.int64) - ord("0")
            fits = (keys[:, : len(prefix)] == prefix).all(1) & ((digits >= 0) & (digits <= 9)).all(1)
            found.append((digits[fits] @ _POWERS, starts[here[fits]], lengths[here[fits]]))
        for node in np.flatnonzero(key_bytes == len(b"meta")):
            if page[nodes[node] + 8 : nodes[node] + 12].tobytes() == b"meta":
                self._metas.append((int(starts[node]), int(lengths[node])))

    def _placed(self, part: str) -> Places:
        """The records of a part, in order and without a gap."""
        found = self._found.pop(part)
        numbers, starts, lengths = (
            map(np.concatenate, zip(*found, strict=True)) if found else [np.empty(0, np.int64)] * 3
        )
        if not np.array_equal(numbers, np.arange(len(numbers))):
            raise ValueError(f"its {len(numbers)} {part} samples are not numbered from 0 up")
        return starts, lengths
