"""What `train --tensorboard` writes: curves, histograms by layer, and the confusion matrix as a picture."""

import bisect
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyhands.errors import UsageError
from manyhands.telemetry.event_file import EventWriter, Histogram, Picture
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
    """Turns records into what TensorBoard shows as they come, so that it serves an export and a live run alike.

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
        elif kind == "layers" and isinstance(step, int):
            self._add_layers(step, record)
        elif kind == "classes" and isinstance(step, int) and (matrix := _confusion(record.get("confusion"))):
            self._writer.picture("evaluate/confusion", matrix, step, record["t"])

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

    def _add_layers(self, step: int, record: Record) -> None:
        """Norms as curves; TensorBoard shows histograms below each other, one for each step."""
        norms, histograms = dict[str, float](), dict[str, Histogram]()
        layers = record.get("layers")
        for layer in layers if isinstance(layers, list) else ():
            for what in ("weight", "gradient") if isinstance(layer, dict) else ():
                tag, norm = f"{what}s/{layer.get('name')}", number(layer.get(f"{what}_norm"))
                if norm is not None:
                    norms[f"{what} norms/{layer.get('name')}"] = norm
                    found = _histogram(layer.get(f"{what}_range"), layer.get(f"{what}_counts"), norm)
                    histograms |= {tag: found} if found else {}
        self._writer.scalars(norms, step, record["t"])
        self._writer.histograms(histograms, step, record["t"])

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


def _histogram(ends: Any, counts: Any, norm: float) -> Histogram | None:
    if not (isinstance(ends, list) and len(ends) == 2 and isinstance(counts, list) and counts):
        return None
    low, high = number(ends[0]), number(ends[1])
    if low is None or high is None or not all(isinstance(count, int) and count >= 0 for count in counts):
        return None
    return Histogram(low, high, counts, norm) if math.isfinite(low + high + norm * norm) else None


def _confusion(rows: Any) -> Picture | None:
    """A row for each true class and a column for each predicted one: white is never, dark blue always."""
    if not isinstance(rows, list) or not 1 <= len(rows) <= _MOST_CLASSES:
        return None
    if not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        return None
    side = max(1, _PIXELS // len(rows))
    lines = [line for row in rows for line in [b"".join(_cells(row, side))] * side]
    return Picture(side * len(rows), lines)


def _cells(row: list[Any], side: int) -> Iterator[bytes]:
    counts = [max(0.0, number(count, 0.0)) for count in row]
    whole = sum(counts) or 1.0
    for count in counts:
        share = count / whole if math.isfinite(whole) else 0.0
        color = (round(255 + share * (end - 255)) for end in _DARK)
        yield bytes(color) * side


_DARK = (8, 48, 107)
_PIXELS = 320
_MOST_CLASSES = 256
