"""A series of any length in bounded memory: least, greatest and mean of the values in each piece of its axis.

The pieces have one width. When a value lies beyond the last piece, the width doubles and neighbours become one; so a
spike of one step stays the greatest value of its piece, however long the series grows and however far away a person
looks at it.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

CAPACITY = 1 << 14
FARTHEST = 1e15


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a plot draws: one entry for each piece in which there is a value."""

    width: float
    x: Numbers
    total: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


class Buckets:
    """Values by their place on an axis that begins at `start`."""

    def __init__(self, start: float, width: float, capacity: int = CAPACITY) -> None:
        self.start = start
        self.width = width
        self._capacity = capacity
        self._used = 0
        self._count = np.zeros(64, np.int64)
        self._sum = np.zeros(64)
        self._low = np.full(64, math.inf)
        self._high = np.full(64, -math.inf)
        self._changed = 0

    def add(self, x: Numbers, y: Numbers) -> None:
        """Take values; those that are no numbers, or that lie before the start or absurdly far, are left out."""
        offset = x - self.start
        fits = np.isfinite(y) & (offset >= 0) & (offset < FARTHEST)
        if not fits.all():
            offset, y = offset[fits], y[fits]
        if not len(offset):
            return
        while offset.max() >= self.width * self._capacity:
            self._double()
        places = (offset / self.width).astype(np.int64)
        self._reserve(int(places.max()) + 1)
        np.add.at(self._count, places, 1)
        np.add.at(self._sum, places, y)
        np.minimum.at(self._low, places, y)
        np.maximum.at(self._high, places, y)
        self._changed = min(self._changed, int(places.min()))

    def group(self, first: float = -math.inf, last: float = math.inf, *, most: int) -> int:
        """How many pieces make a column (1, 2, 4, …) if this part of the axis is to have at most so many columns."""
        pieces = min(self._place(last) + 1, self._used) - self._place(first)
        return 1 << max(0, math.ceil(math.log2(max(pieces, 1) / most)))

    def columns(self, first: float = -math.inf, last: float = math.inf, *, group: int = 1) -> Columns:
        """The part of the axis from `first` to `last`.

        The edges of columns do not depend on where the part begins, so what is drawn does not flicker.
        """
        begin = self._place(first)
        end = min(self._place(last) + 1, self._used)
        begin -= begin % group
        if begin >= end:
            nothing = np.zeros(0)
            return Columns(
                width=self.width * group, x=nothing, total=nothing, mean=nothing, low=nothing, high=nothing
            )
        edges = np.arange(begin, end, group)
        count = np.add.reduceat(self._count[:end], edges)
        there = count > 0
        total = np.add.reduceat(self._sum[:end], edges)[there]
        return Columns(
            width=self.width * group,
            x=self.start + edges[there].astype(np.float64) * self.width,
            total=total,
            mean=total / count[there],
            low=np.minimum.reduceat(self._low[:end], edges)[there],
            high=np.maximum.reduceat(self._high[:end], edges)[there],
        )

    def take_changed(self) -> float:
        """From where on the axis something is new since the last call; infinity where nothing is."""
        changed, self._changed = self._changed, self._used
        return self.start + changed * self.width if changed < self._used else math.inf

    def _place(self, x: float) -> int:
        if x in (math.inf, -math.inf):
            return self._used if x > 0 else 0
        return min(max(int((x - self.start) / self.width), 0), self._used)

    def _reserve(self, needed: int) -> None:
        self._used = max(self._used, needed)
        more = min(max(needed, 2 * len(self._count)), self._capacity) - len(self._count)
        if needed <= len(self._count):
            return
        self._count = np.concatenate([self._count, np.zeros(more, np.int64)])
        self._sum = np.concatenate([self._sum, np.zeros(more)])
        self._low = np.concatenate([self._low, np.full(more, math.inf)])
        self._high = np.concatenate([self._high, np.full(more, -math.inf)])

    def _double(self) -> None:
        """Two neighbours become one piece."""
        self.width *= 2
        self._used = -(-self._used // 2)
        self._changed = 0
        size = len(self._count)
        for name, merge, empty in (
            ("_count", np.add, 0),
            ("_sum", np.add, 0.0),
            ("_low", np.minimum, math.inf),
            ("_high", np.maximum, -math.inf),
        ):
            values = getattr(self, name)
            merged = np.full(size, empty, values.dtype)
            merged[: size // 2] = merge(values[0::2], values[1::2])
            setattr(self, name, merged)
