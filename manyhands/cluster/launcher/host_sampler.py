"""Once a second the launcher writes down what its host uses: `events/host-<number>.jsonl` in the run's directory.

Under torchrun, MPI and Slurm there is no launcher of ours: the first worker of each host does it, in the thread that
writes its records.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.errors import UsageError
from manyhands.telemetry import lines
from manyhands.telemetry.host_usage import HostUsage
from manyhands.telemetry.record_log import RecordLog

PERIOD_S = 1.0


class HostSampler:
    """Samples this host, which has that number in the run; `pids` gives the run's processes on it by their names.

    Nothing is written before the run itself has recorded something: a run that was refused leaves no trace.
    """

    def __init__(self, run: Path, host: int, pids: Callable[[], Mapping[str, int]]) -> None:
        self._events = run / "events"
        self._host = host
        self._pids = pids
        self._file: RecordLog | None = None
        self._due_s = time.monotonic() + PERIOD_S
        try:
            self._usage: HostUsage | None = HostUsage()
        except (OSError, ValueError, KeyError):  # not Linux, or a container that hides these files
            self._usage = None

    def tick(self) -> None:
        """To be called several times a second; never raises."""
        now_s = time.monotonic()
        if self._file is not None:
            self._file.tend()
        if now_s >= self._due_s:
            self._due_s = now_s + PERIOD_S
            self._sample()

    def _sample(self) -> None:
        if self._usage is None or not self._is_recorded():
            return
        try:
            fields = self._usage.sample(self._pids())
            if self._file is None:
                self._file = RecordLog(self._events / f"host-{self._host}.jsonl")
        except (OSError, ValueError, KeyError, UsageError):
            self._usage = None  # what cannot be read or written now will not be later
            return
        record = {"kind": "usage", "t": time.time(), "rank": self._host, **fields}
        self._file.append(lines.encode(record), 1)

    def _is_recorded(self) -> bool:
        return self._file is not None or any(self._events.glob("worker-*.jsonl"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Once more, so that the counters are those of the whole run."""
        if self._file is not None:
            self._sample()
            self._file.close()
            self._file = None
