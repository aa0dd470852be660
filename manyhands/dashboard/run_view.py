"""What the page knows of one run: curves, workers, hosts and what happened, from its records as they come.

Nothing in a record is trusted: a field of the wrong type or a value out of range is left out. Memory is bounded,
however long the run is and whatever its files hold.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from manyhands.dashboard.buckets import Buckets
from manyhands.dashboard.happenings import Happenings
from manyhands.dashboard.host_curves import HostCurves
from manyhands.dashboard.worker_times import PARTS, WorkerTimes
from manyhands.telemetry.lines import Record, number

LARGEST_STEP = 1 << 50
MOST_GAP = 1 << 20
MOST_CURVES = 64
SPEED_S = 5.0
PRESENT_S = 10.0
A_DAY_S = 86_400.0
_AMOUNTS = tuple(f"{part}_s" for part in PARTS)


class RunView:
    """The state of one run."""

    def __init__(self) -> None:
        self.facts: Record = {}
        self.happenings = Happenings()
        self.by_step: dict[str, Buckets] = {
            "loss": Buckets(0.0, 1.0),
            "t": Buckets(0.0, 1.0),
            "samples": Buckets(0.0, 1.0),
        }
        self.by_time: dict[str, Buckets] = {}
        self.times: WorkerTimes | None = None
        self.staleness: Counter[int] = Counter()
        self.hosts = HostCurves()
        self.usage: dict[int, Record] = {}
        self.first_t = math.inf
        self.last_t = -math.inf
        self.ended: set[int] = set()
        self.last_step: dict[int, tuple[int, float, int]] = {}
        self._recent: deque[tuple[float, float, float]] = deque()  # t, samples, steps

    def add(self, records: Iterable[Record]) -> None:
        """Take what has been recorded since the last call."""
        steps: list[Record] = []
        for record in records:
            if not _is_of_this_age(record["t"]):
                continue
            if record["kind"] == "step":
                steps.append(record)
                continue
            if record["kind"] == "start":  # the steps before it are of another beginning
                self._add_steps(steps)
                steps = []
            self._add_other(record)
        self._add_steps(steps)

    @property
    def present(self) -> list[int]:
        """Workers that have not gone, and that have made a step not long before the newest."""
        since = self.last_t - PRESENT_S
        return [
            rank
            for rank, (_, t, _) in self.last_step.items()
            if t > since and rank not in self.happenings.gone
        ]

    @property
    def step(self) -> int:
        """Steps finished, as a mean over the workers: they may be far apart."""
        steps = [self.last_step[rank][0] for rank in self.present or self.last_step]
        return sum(steps) // len(steps) if steps else 0

    @property
    def epoch(self) -> int:
        return max((epoch for _, _, epoch in self.last_step.values()), default=0)

    def speed(self, now: float) -> tuple[float, float]:
        """Samples per second of all workers and steps per second of one, over the last seconds of the run."""
        until = min(now, max(self.last_t, now - 2 * SPEED_S))
        while self._recent and self._recent[0][0] < until - SPEED_S:
            self._recent.popleft()
        if not self._recent:
            return 0.0, 0.0
        span_s = max(until - max(until - SPEED_S, self.first_t), 0.25)
        samples = sum(entry[1] for entry in self._recent) / span_s
        steps = sum(entry[2] for entry in self._recent) / span_s / max(len(self.present), 1)
        return samples, steps

    def left_s(self, now: float) -> float | None:
        """Time to the last step, where there is one and the run moves."""
        total, speed = number(self.facts.get("total_steps")), self.speed(now)[1]
        return max(total - self.step, 0.0) / speed if total is not None and speed > 0 else None

    def _add_other(self, record: Record) -> None:
        kind, rank = record["kind"], record["rank"]
        self._saw(record["t"])
        if kind == "start":
            self.facts |= {key: value for key, value in record.items() if key not in ("kind", "rank")}
            self.ended.discard(rank)
            self.happenings.gone.discard(rank)
            self.last_step.pop(rank, None)  # it goes on from a checkpoint, or copies the others
        elif kind == "end":
            self.ended.add(rank)
        elif kind == "process":
            self.usage[rank] = record
            for name in ("cpu_percent", "memory_bytes"):
                self._of_time(name, record["t"], number(record.get(name)))
        elif kind == "updates":
            self._add_staleness(record.get("staleness"))
        elif kind == "log":
            self._add_logged(record)
        elif kind == "usage":
            self.hosts.add(record, self.first_t)
        self.happenings.add(record)

    def _add_steps(self, records: list[Record]) -> None:
        rows = [row for record in records if (row := self._row(record)) is not None]
        if not rows:
            return
        table = np.array(rows)
        t, step, samples = table[:, 1], table[:, 2], table[:, 4]
        self._saw(float(t.min()))
        self._saw(float(t.max()))
        if self.times is None:
            self.times = WorkerTimes(self.first_t)
        used = samples > 0  # else the worker had no share of this step
        self.by_step["loss"].add(step[used], table[used, 3])
        self.by_step["t"].add(step, t)
        self.by_step["samples"].add(step[used], samples[used])
        if "samples" not in self.by_time:
            self.by_time["samples"] = Buckets(self.first_t, 0.25, 4096)
        gap = table[:, 5]
        self.by_time["samples"].add(t, samples * gap)
        amounts = table[:, 6:] * np.concatenate(
            [np.repeat(gap[:, None], len(PARTS), 1), np.ones((len(t), 2))], 1
        )
        amounts[:, -1] *= gap
        self.times.add(table[:, 0].astype(np.int64), t, amounts)
        newest = float(t.max())
        self._recent.append((newest, float((samples * gap).sum()), float(gap.sum())))

    def _row(self, record: Record) -> tuple[float, ...] | None:
        """Rank, time, step, loss, samples, steps since the last line of this worker, seconds of parts, wall, samples.

        Of an old run's lines only some are left: each stands for the steps before it that are not there any more.
        """
        rank, t, get = record["rank"], record["t"], record.get
        step, epoch, loss = get("step"), get("epoch"), get("loss")
        if type(step) is not int or not 0 <= step < LARGEST_STEP or not 0 <= rank < 1 << 30:
            return None
        before, before_t, _ = self.last_step.get(rank, (step - 1, t, 0))
        gap = step - before if 0 < step - before < MOST_GAP else 1
        self.last_step[rank] = (step, t, epoch if type(epoch) is int and 0 <= epoch < LARGEST_STEP else 0)
        if type(loss) is not float:
            loss = number(loss, math.nan)
        if not math.isfinite(loss) and get("loss") is not None and get("samples") != 0:
            self.happenings.not_a_number(record)
        samples = _amount(get("samples"))
        compute, *others = map(_amount, map(get, _AMOUNTS))
        compute = max(
            compute - _amount(get("held_s")), 0.0
        )  # what it waited for others meanwhile is in `wait_s`
        wall = min(max(t - before_t, 0.0), A_DAY_S)
        return rank, t, step, loss, samples, gap, compute, *others, wall, samples

    def _add_staleness(self, counts: Any) -> None:
        for value, count in counts.items() if isinstance(counts, dict) else ():
            if str(value).isdecimal() and isinstance(count, int) and 0 < count < LARGEST_STEP:
                self.staleness[min(int(str(value)[:9]), 10_000)] += count

    def _add_logged(self, record: Record) -> None:
        values, step = record.get("values"), record.get("step")
        if not isinstance(values, dict) or not isinstance(step, int) or not 0 <= step < LARGEST_STEP:
            return
        for name, value in values.items():
            found, key = number(value), f"log {str(name)[:100]}"
            if found is None or (key not in self.by_step and len(self.by_step) >= MOST_CURVES):
                continue
            curve = self.by_step.setdefault(key, Buckets(0.0, 1.0))
            curve.add(np.array([float(step)]), np.array([found]))

    def _of_time(self, name: str, t: float, value: float | None) -> None:
        if value is not None:
            curve = self.by_time.setdefault(name, Buckets(self.first_t, 1.0, 4096))
            curve.add(np.array([t]), np.array([value]))

    def _saw(self, t: float) -> None:
        self.first_t = min(self.first_t, t)
        self.last_t = max(self.last_t, t)


def _amount(value: Any) -> float:
    if value is None:
        return 0.0
    found = value if type(value) is float else number(value, 0.0)
    return found if 0 < found < 1e18 else 0.0


def _is_of_this_age(t: float) -> bool:
    return 0 < t < time.time() + A_DAY_S
