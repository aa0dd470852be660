"""Where each worker's time goes, over the time of a run: a table of workers × columns of time, in bounded memory."""

import numpy as np
from numpy.typing import NDArray

PARTS = ("compute", "input", "wait", "exchange", "update")
WALL, SAMPLES = len(PARTS), len(PARTS) + 1
MOST_COLUMNS = 512
MOST_WORKERS = 4096
"""Workers of higher rank are in the curves of the run, and have no row of their own."""
RECENT_COLUMNS = 8

Table = NDArray[np.float32]


class WorkerTimes:
    """Seconds of each part, wall time and samples, for each worker and column of time."""

    def __init__(self, start_t: float, width_s: float = 0.25) -> None:
        self.start_t = start_t
        self.width_s = width_s
        self.workers = 0
        self.columns = 0
        self._table: Table = np.zeros((8, MOST_COLUMNS, SAMPLES + 1), np.float32)

    def add(self, rank: NDArray[np.int64], t: NDArray[np.float64], amounts: NDArray[np.float64]) -> None:
        """A row of amounts (the parts, wall time, samples) for each step that a worker has finished at `t`."""
        offset = np.maximum(t - self.start_t, 0.0)
        fits = (rank >= 0) & (rank < MOST_WORKERS)
        rank, offset, amounts = rank[fits], offset[fits], amounts[fits]
        if not len(rank):
            return
        while offset.max() >= self.width_s * MOST_COLUMNS:
            self._double()
        self._reserve(int(rank.max()) + 1)
        column = (offset / self.width_s).astype(np.int64)
        self.columns = max(self.columns, int(column.max()) + 1)
        np.add.at(self._table, (rank, column), amounts)

    def shares(self, *, recent: bool) -> NDArray[np.float64]:
        """For each worker the fraction of its time that went into each part and into other things."""
        first = max(0, self.columns - RECENT_COLUMNS) if recent else 0
        return _shares(self._table[: self.workers, first : self.columns].sum(axis=1, dtype=np.float64))

    def rates(self) -> NDArray[np.float64]:
        """Samples per second of each worker in the last columns; the very last is not complete."""
        last = max(self.columns - 1, 1)
        recent = self._table[: self.workers, max(0, last - RECENT_COLUMNS) : last]
        span_s = max(recent.shape[1], 1) * self.width_s
        return np.asarray(recent[:, :, SAMPLES].sum(axis=1) / span_s, np.float64)

    def picture(self, what: str, first: int = 0) -> NDArray[np.uint8]:
        """Workers × columns from `first` on, each a shade from 0 to 254; 255 where nothing is known.

        Shares are of the worker's time; `samples` is relative to the fastest.
        """
        table = self._table[: self.workers, first : self.columns]
        known = table[:, :, WALL] > 0
        if what == "samples":
            rate = table[:, :, SAMPLES] / self.width_s
            most = float(self._table[: self.workers, : self.columns, SAMPLES].max(initial=0.0)) / self.width_s
            value = rate / most if most > 0 else rate
        else:
            place = PARTS.index(what) if what in PARTS else len(PARTS)
            value = _shares(table)[:, :, place]
        shade = np.clip(np.nan_to_num(value) * 254, 0, 254).astype(np.uint8)
        return np.where(known, shade, np.uint8(255))

    def _reserve(self, workers: int) -> None:
        self.workers = max(self.workers, workers)
        if workers > len(self._table):
            rows = min(max(workers, 2 * len(self._table)), MOST_WORKERS)
            table = np.zeros((rows, *self._table.shape[1:]), np.float32)
            table[: len(self._table)] = self._table
            self._table = table

    def _double(self) -> None:
        self.width_s *= 2
        self.columns = -(-self.columns // 2)
        merged = np.zeros_like(self._table)
        merged[:, : MOST_COLUMNS // 2] = self._table[:, 0::2] + self._table[:, 1::2]
        self._table = merged


def _shares(table: NDArray[np.floating]) -> NDArray[np.float64]:
    """Along the last axis: parts and other, as fractions. Parts may overlap, and then they share the whole."""
    parts = table[..., : len(PARTS)].astype(np.float64)
    spent = parts.sum(axis=-1)
    whole = np.maximum(table[..., WALL], spent)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.nan_to_num(parts / whole[..., None])
        other = np.where(whole > 0, 1 - shares.sum(axis=-1), 0.0)
    return np.concatenate([shares, other[..., None]], axis=-1)
