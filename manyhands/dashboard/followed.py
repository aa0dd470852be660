"""Runs that are looked at: one thread reads what they write, and all pages that watch get the same answer.

A run is read from its beginning when it is first looked at, a few megabytes at a time; it is forgotten when no page has
asked for it for a while. However many watch a run, it is read and encoded once.
"""

import math
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from manyhands.dashboard.answers import ReadRun, changes, snapshot
from manyhands.diagnosis import Diagnosis
from manyhands.telemetry.lines import Record
from manyhands.telemetry.read import Tail

POLL_S = 0.08
QUIET_S = 0.5
BEHIND_S = 0.4
"""How often a page hears of a run that is still read from its beginning."""
AT_ONCE_BYTES = 4 << 20
FORGET_S = 60.0
MOST_RUNS = 12
DIAGNOSE_S = 2.0
HEARD_WHOLE = 100_000
KEPT_OF = 16
MOST_BUSY = 0.3
"""Part of the time that reading may take while a run is up to date; the rest belongs to the run itself."""


class Followed(ReadRun):
    """One run as it is read, and the two messages that a page can get of it."""

    def __init__(self, place: Path) -> None:
        super().__init__(place=place)
        self.wanted_s = time.monotonic()
        self._tail = Tail(place)
        self._diagnosis = Diagnosis(recent=not (place / "summary.json").exists())
        self._diagnosed_s = 0.0
        self._caught_up = 0
        self._message = (0, b"")  # the newest changes, and the version that they lead to
        self._whole = (-1, b"")

    def read(self) -> bool:
        """Take what is new; says whether there was anything."""
        records = self._tail.poll(AT_ONCE_BYTES)
        was_behind, self.is_behind = self.is_behind, self._tail.is_behind
        if not records and was_behind == self.is_behind and self.version:
            return False
        with self.lock:
            self.damaged = self._tail.damaged
            self.view.add(records)
            self._diagnosis.add(self._heard(records) if self.is_behind else records)
            if time.monotonic() - self._diagnosed_s > DIAGNOSE_S and not self.is_behind:
                self._diagnosed_s = time.monotonic()
                self.findings = self._diagnosis.findings()
            self.version += 1
            self._message = (self.version, msgspec.json.encode(changes(self)))
        return True

    def _heard(self, records: list[Record]) -> list[Record]:
        """Of a long run that is read from its beginning the diagnosis hears a part of the steps, as if it were thinned:
        a person waits for the page."""
        self._caught_up += len(records)
        if self._caught_up < HEARD_WHOLE:
            return records
        return [one for one in records if one["kind"] != "step" or _is_kept(one.get("step"))]

    def message(self, since: int) -> tuple[int, bytes]:
        """What a page that has the version `since` needs: the changes where it is one behind, else everything."""
        with self.lock:
            version, encoded = self._message
            if since == version - 1 and since > 0:
                return version, encoded
            if self._whole[0] != version:
                self._whole = (version, msgspec.json.encode(snapshot(self)))
            return self._whole


def _is_kept(step: object) -> bool:
    return isinstance(step, int) and step % KEPT_OF == 0


def _was_read(run: Followed) -> bool:
    """A run whose files hold what was not thought of is no reason to follow none."""
    try:
        return run.read()
    except Exception:
        traceback.print_exc()
        run.wanted_s = -math.inf  # forgotten, until a page asks for it again
        return False


class Follower:
    """The thread that reads; `tell` is called from it after every reading that has found something."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._runs: dict[Path, Followed] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def follow(self, place: Path) -> Followed:
        """The run in that directory, read from now on."""
        with self._lock:
            run = self._runs.get(place)
            if run is None:
                run = self._runs[place] = Followed(place)
                self._wake.set()
            run.wanted_s = time.monotonic()
            while len(self._runs) > MOST_RUNS:
                del self._runs[min(self._runs, key=lambda one: self._runs[one].wanted_s)]
            return run

    def forget(self, place: Path) -> None:
        """A run that is removed."""
        with self._lock:
            self._runs.pop(place, None)

    def close(self) -> None:
        self._is_over = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        told_s = 0.0
        while not self._is_over:
            began_s = time.perf_counter()
            with self._lock:
                old_s = time.monotonic() - FORGET_S
                self._runs = {place: run for place, run in self._runs.items() if run.wanted_s > old_s}
                runs = list(self._runs.values())
            found = [_was_read(run) for run in runs]
            is_behind = any(run.is_behind for run in runs)
            if any(found) and (not is_behind or began_s - told_s > BEHIND_S):
                self._tell()
                told_s = began_s
            if is_behind:
                self._wake.wait(0.001)
            else:
                took_s = time.perf_counter() - began_s
                pause_s = max(POLL_S - took_s, took_s * (1 / MOST_BUSY - 1)) if runs else QUIET_S
                self._wake.wait(pause_s)
            self._wake.clear()
