"""What the records of a run say of each of its processes: sums over steps, which every rule works on.

Steps that are unlike the others are left out: the first ones, and those in which a worker paused (an evaluation, a
checkpoint, the end of an epoch, another generation). Nothing in a record is trusted.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from manyhands.telemetry.lines import Record, number

WARM_UP_STEPS = 3
CHUNK_STEPS = 32
RECENT_CHUNKS = 4
PARTS = ("input", "forward", "backward", "update", "outside")
"""What a worker does by itself: waits for its data, its passes, updates, and what the script does between steps."""


@dataclass
class StepSums:
    """Sums over some steps of one worker, in seconds."""

    steps: int = 0
    wall: float = 0.0
    waiting: float = 0.0  # for other workers, servers or the network
    own: float = 0.0
    own_squares: float = 0.0
    sent_bytes: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add_step(self, wall_s: float, record: Record) -> None:
        seconds = {name: amount(record, f"{name}_s") for name in _COUNTED}
        held_s = min(seconds["held"], seconds["compute"])
        forward_s = min(seconds["forward"], seconds["compute"] - held_s)
        parts = {
            "input": seconds["input"],
            "forward": forward_s,
            "backward": seconds["compute"] - held_s - forward_s,
            "update": seconds["update"],
        }
        # What goes on in other threads meanwhile is no waiting: a worker's own work comes first.
        busy_s = sum(parts.values())
        own_s = min(wall_s, max(busy_s, wall_s - seconds["wait"] - seconds["exchange"]))
        parts["outside"] = max(0.0, own_s - busy_s)
        self.steps += 1
        self.wall += wall_s
        self.own += own_s
        self.own_squares += own_s * own_s
        self.waiting += wall_s - own_s
        self.sent_bytes += amount(record, "bytes_sent")
        for name, value in parts.items():
            self.parts[name] += value

    def add(self, other: "StepSums") -> None:
        self.steps += other.steps
        self.wall += other.wall
        self.waiting += other.waiting
        self.own += other.own
        self.own_squares += other.own_squares
        self.sent_bytes += other.sent_bytes
        for name, value in other.parts.items():
            self.parts[name] += value

    @property
    def own_s(self) -> float:
        """A step's own time, as a mean."""
        return self.own / max(self.steps, 1)

    @property
    def own_error_s(self) -> float:
        """The standard error of that mean."""
        count = max(self.steps, 1)
        variance = max(self.own_squares / count - self.own_s**2, 0.0)
        return math.sqrt(variance / count)

    def part_s(self, name: str) -> float:
        return self.parts[name] / max(self.steps, 1)


class WorkerEvidence:
    """One worker: of all its steps, or of the `recent` ones alone."""

    def __init__(self, *, recent: bool) -> None:
        self.rate: float | None = None
        self._chunks: deque[StepSums] = deque([StepSums()])
        self._recent = recent
        self._seen = 0
        self._last: tuple[int, float, int] | None = None  # step, time and epoch of the last record
        self._paused = True

    def pause(self) -> None:
        """The next step has more in it than a step."""
        self._paused = True

    def add_step(self, record: Record) -> None:
        step, t, epoch = record.get("step"), float(record["t"]), record.get("epoch")
        if not isinstance(step, int) or not isinstance(epoch, int):
            return
        before, self._last = self._last, (step, t, epoch)
        self._seen += 1
        if before is None:
            return
        follows = (step, epoch) == (before[0] + 1, before[2]) and t > before[1]
        is_plain = not self._paused and "recover_s" not in record and record.get("samples") != 0
        self._paused = False
        if follows and is_plain and self._seen > WARM_UP_STEPS:
            self._room().add_step(t - before[1], record)

    def _room(self) -> StepSums:
        """Where the next step is added."""
        if self._chunks[-1].steps >= CHUNK_STEPS:
            self._chunks.append(StepSums())
            if self._recent and len(self._chunks) > RECENT_CHUNKS:
                self._chunks.popleft()
            elif not self._recent and len(self._chunks) > 2:
                self._chunks[0].add(self._chunks[1])
                del self._chunks[1]
        return self._chunks[-1]

    def sums(self) -> StepSums:
        whole = StepSums()
        for chunk in self._chunks:
            whole.add(chunk)
        return whole


class ServerEvidence:
    """One server: how much of its time it works, between its first and its last record."""

    def __init__(self) -> None:
        self._first: tuple[float, float, float] | None = None
        self._last = (0.0, 0.0, 0.0)

    def add(self, record: Record) -> None:
        self._last = (float(record["t"]), amount(record, "wait_s"), amount(record, "update_s"))
        if self._first is None or self._last[1] < self._first[1]:  # another process has its number
            self._first = self._last

    def busy(self) -> tuple[float, float]:
        """The parts of its time in which it works at all, and in which it runs the optimizer."""
        if self._first is None or self._last[0] - self._first[0] < LEAST_SERVING_S:
            return 0.0, 0.0
        passed, waited, updated = (now - then for now, then in zip(self._last, self._first, strict=True))
        return max(0.0, 1 - waited / passed), min(1.0, updated / passed)


LEAST_SERVING_S = 0.9
_COUNTED = ("input", "forward", "compute", "held", "update", "wait", "exchange")


def amount(record: Mapping[str, object], name: str) -> float:
    """A field that is a count, of seconds or bytes; 0 where it is missing or none."""
    value = number(record.get(name), 0.0) if name in record else 0.0
    return value if 0.0 <= value < 1e18 else 0.0
