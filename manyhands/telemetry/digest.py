"""What a run looks like now: the figures that a display shows, computed from the records as they come.

Nothing in a record is trusted: a field of the wrong type or a value out of range is left out.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from manyhands.telemetry.lines import Record, number

PARTS = ("compute", "wait", "exchange", "update")
MEMORY_S = 8.0
LOSS_WEIGHT = 0.05


class Digest:
    """The state of a run of so many workers."""

    def __init__(self, workers: int) -> None:
        self.workers_expected = workers
        self.workers: dict[int, WorkerDigest] = {}
        self.total_steps: int | None = None
        self.epochs: int | None = None
        self.loss: float | None = None
        self.evaluation: Record | None = None
        self._losses = 0
        self._smooth_loss = 0.0

    def add(self, records: Iterable[Record]) -> None:
        """Take what has been recorded since the last call."""
        for record in records:
            kind = record["kind"]
            if kind in ("start", "step", "end"):
                worker = self.workers.setdefault(record["rank"], WorkerDigest())
                worker.ended = kind == "end"
                if kind == "start":
                    self.total_steps = _whole(record.get("total_steps")) or self.total_steps
                    self.epochs = _whole(record.get("epochs")) or self.epochs
                    worker.t = record["t"]
                elif kind == "step":
                    worker.add_step(record)
                    if record.get("samples") != 0:  # a worker that had no share of this step
                        self._add_loss(record.get("loss"))
            elif kind in ("death", "leave"):
                self.workers.pop(record["rank"], None)
            elif kind == "evaluate":
                self.evaluation = record
        for worker in self.workers.values():
            worker.settle()

    @property
    def step(self) -> int:
        """Steps finished, as a mean over the workers that have reported: they may be far apart."""
        steps = [worker.step for worker in self.workers.values()]
        return sum(steps) // len(steps) if steps else 0

    @property
    def epoch(self) -> int:
        return max((worker.epoch for worker in self.workers.values()), default=0)

    @property
    def missing(self) -> list[int]:
        """Workers that have not reported yet."""
        return [rank for rank in range(self.workers_expected) if rank not in self.workers]

    def rates(self) -> dict[int, float]:
        """Samples per second of each worker that has reported."""
        return {rank: worker.per_second("samples") for rank, worker in sorted(self.workers.items())}

    def bytes_per_second(self) -> float:
        return sum(worker.per_second("bytes_sent") for worker in self.workers.values())

    def left_s(self) -> float | None:
        """Time to the last step at the present speed, where there is a last step and a speed."""
        if self.total_steps is None or not self.workers:
            return None
        speed = sum(worker.per_second("steps") for worker in self.workers.values()) / len(self.workers)
        return max(self.total_steps - self.step, 0) / speed if speed > 0 else None

    def shares(self) -> dict[str, float]:
        """Which part of the workers' time went where, as fractions that add up to 1; empty when unknown.

        Parts may overlap (an exchange goes on during the computation); then they share the whole.
        """
        spent = {part: sum(w.recent[part + "_s"] for w in self.workers.values()) for part in PARTS}
        whole = max(sum(worker.span_s for worker in self.workers.values()), sum(spent.values()))
        if whole <= 0 or not any(spent.values()):
            return {}
        shares = {part: seconds / whole for part, seconds in spent.items() if seconds > 0}
        return shares | {"other": max(1 - sum(shares.values()), 0.0)}

    def _add_loss(self, field: Any) -> None:
        value = number(field)
        if value is None:
            return
        self.loss = value
        if math.isfinite(value):  # one that is not is shown as it is, and forgotten with the next good one
            self._losses += 1
            weight = max(LOSS_WEIGHT / max(self.workers_expected, 1), 1 / self._losses)
            self._smooth_loss += weight * (value - self._smooth_loss)
            if not math.isfinite(self._smooth_loss):
                self._smooth_loss = value
            self.loss = self._smooth_loss


class WorkerDigest:
    """One worker's place and speed; sums fade, so that they tell of the last few seconds."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.ended = False
        self.t: float | None = None
        self.span_s = 0.0
        self.recent: defaultdict[str, float] = defaultdict(float)
        self._new: defaultdict[str, float] = defaultdict(float)
        self._new_span_s = 0.0
        self._seen_s = time.monotonic()

    def add_step(self, record: Record) -> None:
        self.step = _whole(record.get("step")) or self.step
        self.epoch = _whole(record.get("epoch")) or self.epoch
        before, self.t = self.t, record["t"]
        if before is None or record["t"] < before:
            return  # nothing to measure this step's time from
        self._new_span_s += record["t"] - before
        self._new["steps"] += 1
        for name in _SUMMED:
            if name in record and 0 < (value := number(record[name], 0.0)) < 1e18:
                self._new[name] += value

    def settle(self) -> None:
        """Fold what came since the last time into the fading sums."""
        if self._new:
            keep = math.exp(-self._new_span_s / MEMORY_S)
            self.span_s = self.span_s * keep + self._new_span_s
            for name in self.recent.keys() | self._new.keys():
                self.recent[name] = self.recent[name] * keep + self._new[name]
            self._new.clear()
            self._new_span_s = 0.0
            self._seen_s = time.monotonic()

    def per_second(self, name: str) -> float:
        """Speed of late; a worker that should have reported by now slows down."""
        if self.span_s <= 0:
            return 0.0
        expected_s = 1.0 + 2 * self.span_s / max(self.recent["steps"], 1e-3)
        overdue_s = 0.0 if self.ended else time.monotonic() - self._seen_s - expected_s
        return self.recent[name] / (self.span_s + max(overdue_s, 0.0))


_SUMMED = ("samples", "bytes_sent", *(part + "_s" for part in PARTS))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else None
