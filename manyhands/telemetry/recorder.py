"""The recorder of this process.

A training step must not notice it: counting adds to a dictionary, a finished step appends a tuple to a list,
and a daemon thread turns tuples into lines and appends them to the file four times a second. A killed process
loses at most the last quarter of a second. The thread also keeps the file short (`thinning.py`).

Counters only ever grow. A step stores a copy of them and the thread writes the differences, so there is
nothing to reset and nothing to lose between threads. Any thread may count: `counters[name] += amount` on a
plain dictionary holds no point at which the interpreter would hand over to another thread.
"""

import atexit
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from manyhands.telemetry import lines
from manyhands.telemetry.process import Usage
from manyhands.telemetry.record_log import RecordLog
from manyhands.telemetry.thinning import SLICE_S

FLUSH_PERIOD_S = 0.25
PROCESS_PERIOD_S = 1.0
CLOSE_TIMEOUT_S = 10.0
_REST_S = 10 * SLICE_S

_Pending = tuple[str, float, dict[str, float] | None, dict[str, Any]]  # kind, t, counters so far, fields

_counters: defaultdict[str, float] = defaultdict(int)
_pending: list[_Pending] = []
_writer: "_RecordWriter | None" = None
_opening = threading.Lock()  # workers may be threads of one process: only one of their files may be open


def count(name: str, amount: float) -> None:
    """Add to a counter of the current step."""
    _counters[name] += amount


def add_seconds(name: str, seconds: float) -> None:
    """Add to the time that this step spent in a part of its work; `compute` is counted as `compute_s`."""
    _counters[name + "_s"] += seconds


def count_processor_time() -> None:
    """From now on every part also counts the processor seconds of this process, `compute` as `compute_processor_s`:
    busy neighbours hardly change them."""
    global _processor
    _processor = time.process_time


class timed:
    """Add the time spent inside the `with` block, also when it raises: `with timed("exchange"): ...`."""

    __slots__ = ("_began_s", "_name", "_processor_s")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._began_s = _clock()
        if _processor is not None:
            self._processor_s = _processor()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _counters[self._name + "_s"] += _clock() - self._began_s
        if _processor is not None:
            _counters[self._name + "_processor_s"] += _processor() - self._processor_s


class computing(timed):
    """`timed("compute")` around the passes of a step. What was waited for inside of them, for another worker's turn or
    for a server, is in `held_s` as well: it is none of this worker's own time."""

    __slots__ = ("_waited_s",)

    def __init__(self) -> None:
        super().__init__("compute")

    def __enter__(self) -> None:
        self._waited_s = _counters["wait_s"]
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        _counters["held_s"] += _counters["wait_s"] - self._waited_s


def step(*, step: int, epoch: int, loss: float | None, samples: int, **more: Any) -> None:
    """Record a finished step of this worker with everything counted since the last one.

    `step` is the number of steps finished, this one included; `epoch` counts from 0; `samples` is the number
    that this worker used. A `loss` that only the script knows is None.
    """
    if _writer is not None:
        fields = {"step": step, "epoch": epoch, "loss": loss, "samples": samples, **more}
        _pending.append(("step", _now(), _counters.copy(), fields))


def event(kind: str, **fields: Any) -> None:
    """Record anything else; it is in the file a quarter of a second later."""
    if _writer is not None:
        _pending.append((kind, _now(), None, fields))


def totals() -> dict[str, float]:
    """All counters since `open`, or since the start of the process without it."""
    return dict(_counters)


def open(path: Path, *, rank: int) -> None:
    """Append this process's records to `path` from now on, with all counters at zero."""
    global _writer
    with _opening:
        _close()
        writer = _RecordWriter(path, rank)
        _counters.clear()
        _pending.clear()
        _writer = writer


class Companion(Protocol):
    """Something else to be written now and then beside the records, which never raises."""

    def tick(self) -> None: ...

    def close(self) -> None: ...


def accompany(companion: Companion) -> None:
    """Call this in the writing thread several times a second, as long as records are written."""
    if _writer is not None:
        _writer.companion = companion


def close() -> None:
    """Write what is pending and stop; records after this are dropped until the next `open`."""
    with _opening:
        _close()


def _close() -> None:
    global _writer
    writer, _writer = _writer, None
    if writer is not None:
        writer.close()


class _RecordWriter:
    """The file and the thread that appends to it."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._written: dict[str, float] = {}
        self._usage = Usage()
        self._sampled_s = _clock()
        self._file = RecordLog(path)
        self.companion: Companion | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # else a disk hangs: better to lose records than to hang with it
            self._flush(with_process=True)
            if self.companion is not None:
                self.companion.close()
            self._file.close()

    def forget(self) -> None:
        """In a forked child: the thread is not here, and the records are the parent's to write."""
        self.companion = None
        self._file.forget()

    def _run(self) -> None:
        flush_at_s = _clock() + FLUSH_PERIOD_S
        while not self._stopping.wait(_REST_S if self._file.is_thinning else max(0.0, flush_at_s - _clock())):
            if _clock() >= flush_at_s:
                self._flush(with_process=_clock() - self._sampled_s >= PROCESS_PERIOD_S)
                flush_at_s = _clock() + FLUSH_PERIOD_S
            self._file.tend()
            if self.companion is not None:
                self.companion.tick()

    def _flush(self, *, with_process: bool) -> None:
        if with_process:
            self._sampled_s = _clock()
            _pending.append(("process", _now(), None, dict(self._usage.sample())))
        # Others append at the end meanwhile, so the list must stay the same list.
        batch = _pending[:]
        del _pending[: len(batch)]
        encoded = [line for line in map(self._line, batch) if line is not None]
        self._file.append(b"".join(encoded), len(batch), len(batch) - len(encoded))

    def _line(self, pending: _Pending) -> bytes | None:
        kind, t, counters, fields = pending
        record = {"kind": kind, "t": t, "rank": self._rank, **fields}
        if counters is not None:
            written, self._written = self._written, counters
            for name, value in counters.items():
                if value != (before := written.get(name, 0)):
                    record[name] = value - before
        try:
            return lines.encode(record)
        except Exception:  # a field that cannot be written must cost its own line only
            return None


def _forget_in_child() -> None:
    global _writer, _opening
    writer, _writer = _writer, None
    _opening = threading.Lock()  # another thread may have held it
    _pending.clear()
    _counters.clear()
    if writer is not None:
        writer.forget()


_clock = time.perf_counter
_processor: Callable[[], float] | None = None
_now = time.time
atexit.register(close)
os.register_at_fork(after_in_child=_forget_in_child)
