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


class Digest:
    """The state of a run of so many workers."""

    def __init__(self, workers: int) -> None:
        self.workers_expected = workers
        self.workers: dict[int, WorkerDigest] = {}
        self._gone: set[int] = (
            set()
        )  # members that have died or left; another in its place has its own number
        self.total_steps: int | None = None
        self.epochs: int | None = None
        self.evaluation: Record | None = None

    def add(self, records: Iterable[Record]) -> None:
        """Take what has been recorded since the last call."""
        for record in records:
            kind = record["kind"]
            if kind in ("start", "step", "end"):
                if record["rank"] in self._gone:
                    continue  # recorded before it went, read after
                worker = self.workers.setdefault(record["rank"], WorkerDigest())
                worker.ended = kind == "end"
                if kind == "start":
                    self.total_steps = _whole(record.get("total_steps")) or self.total_steps
                    self.epochs = _whole(record.get("epochs")) or self.epochs
                    worker.t = record["t"]
                elif kind == "step":
                    worker.add_step(record)
            elif kind == "log":
                self._add_logged(record)
            elif kind in _CHANGES:
                self._change(record)
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
    def steps_of_all(self) -> int:
        """Added up over the workers: it changes whenever one of them makes a step."""
        return sum(worker.step for worker in self.workers.values())

    @property
    def epoch(self) -> int:
        return max((worker.epoch for worker in self.workers.values()), default=0)

    @property
    def missing(self) -> list[int]:
        """Workers that the run has begun with, that have not gone, and that have not reported yet."""
        known = self.workers.keys() | self._gone
        return [rank for rank in range(self.workers_expected) if rank not in known]

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

    @property
    def loss(self) -> float | None:
        """Of the last step, as the mean over the workers that have reported one."""
        return _mean(worker.loss for worker in self.workers.values())

    @property
    def logged(self) -> dict[str, float]:
        """What scripts have logged last, by name, as the mean over the workers that have."""
        names = dict.fromkeys(name for worker in self.workers.values() for name in worker.logged)
        means = {name: _mean(worker.logged.get(name) for worker in self.workers.values()) for name in names}
        return {name: value for name, value in means.items() if value is not None}

    def _change(self, record: Record) -> None:
        """Members have died, left or joined, or all begin again."""
        if record["kind"] == "again":
            self.workers.clear()
            self._gone.clear()
            return
        if record["kind"] == "join":
            self._gone.discard(record["rank"])
            return
        ranks = record.get("ranks") if record["kind"] == "host" else [record["rank"]]
        for rank in ranks if isinstance(ranks, list) else []:
            if isinstance(rank, int):
                self._gone.add(rank)
                self.workers.pop(rank, None)

    def _add_logged(self, record: Record) -> None:
        worker, values = self.workers.get(record["rank"]), record.get("values")
        if worker is not None and isinstance(values, dict):
            found = {str(name): number(value) for name, value in values.items()}
            worker.logged |= {name: value for name, value in found.items() if value is not None}


class WorkerDigest:
    """One worker's place and speed; sums fade, so that they tell of the last few seconds."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.ended = False
        self.loss: float | None = None
        self.logged: dict[str, float] = {}
        self.t: float | None = None
        self.span_s = 0.0
        self.recent: defaultdict[str, float] = defaultdict(float)
        self._new: defaultdict[str, float] = defaultdict(float)
        self._new_span_s = 0.0
        self._seen_s = time.monotonic()

    def add_step(self, record: Record) -> None:
        self.step = _whole(record.get("step")) or self.step
        self.epoch = _whole(record.get("epoch")) or self.epoch
        if record.get("samples") != 0:  # else it had no share of this step
            loss = number(record.get("loss"))
            self.loss = self.loss if loss is None else loss
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


_CHANGES = ("death", "leave", "host", "join", "again")
_SUMMED = ("samples", "bytes_sent", *(part + "_s" for part in PARTS))


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else None
