"""Runs that the page has started: `manyhands train` in processes of their own, as a person would type it.

They end with the page: told by SIGTERM they finish their step, save and leave, so that nothing is lost and `--resume`
goes on. If the page is killed, the kernel tells them.
"""

import ctypes
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from manyhands.checkpoint.index import latest
from manyhands.dashboard.run_list import ASKED, TERMINAL, RunList
from manyhands.errors import UsageError
from manyhands.foreign.regular import not_through_links
from manyhands.job.plan import Plan
from manyhands.launching.run import make_directory

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
STOP_S = 60.0
_PR_SET_PDEATHSIG = 1


class OwnRuns:
    """The processes that the page has started, by the names of their runs."""

    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, plan: Plan, name: str, *, fetch: bool = False) -> str:
        """Train as the plan says, in a new run; gives its name."""
        name = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.model}-{plan.data}-{plan.strategy}"
        name = re.sub("[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100]
        if not NAME.fullmatch(name):
            raise UsageError("a run's name has letters, digits, dots and dashes, at most 100, a letter first")
        place = self._runs.directory / name
        if os.path.lexists(place):
            raise UsageError(f"there is a run called {name} already; choose another name")
        make_directory(place)
        plan.write(place / ASKED)
        self._spawn(name, place, [str(place / ASKED), *(["--fetch"] if fetch else [])])
        return name

    def resume(self, name: str, epochs: int | None) -> None:
        """Go on from the newest checkpoint, to so many epochs in all."""
        place = self._idle(name)
        if latest(place / "checkpoints") is None:
            raise UsageError(f"{name} has no checkpoint to go on from; clone it to begin again")
        more = [] if epochs is None else ["--epochs", str(epochs)]
        self._spawn(name, place, ["--resume", *more])

    def stop(self, name: str) -> None:
        """Ask it to finish its step, save and leave."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            raise UsageError(
                f"{name} was not started by this page, or has ended; stop it with Ctrl-C where it was started"
            )
        process.send_signal(signal.SIGTERM)

    def delete(self, name: str) -> Path:
        """Remove a run that is not going on, with its checkpoints."""
        place = self._idle(name)
        if place == self._runs.directory:
            raise UsageError("the page shows this one run; delete its directory by hand")
        grave = place.with_name(f".deleted-{time.time_ns()}")
        place.rename(grave)  # at once: what is half removed is no run
        shutil.rmtree(grave, ignore_errors=True)
        self._processes.pop(name, None)
        return place

    def is_running(self, name: str) -> bool:
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def is_own(self, name: str) -> bool:
        return name in self._processes

    def rows(self) -> list[dict[str, Any]]:
        """The list of runs, live ones first, with what this page knows of its own."""
        rows = [self._with_ours(row) for row in self._runs.rows()]
        return sorted(rows, key=lambda row: (row["state"] != "live", -row["changed_t"]))

    def row(self, name: str) -> dict[str, Any]:
        """How one run stands."""
        return self._with_ours(self._runs.row(name))

    def _with_ours(self, row: dict[str, Any]) -> dict[str, Any]:
        """Of our own runs we know whether they go on."""
        row["is_own"] = self.is_running(row["name"])
        if row["is_own"]:
            row["state"], row["error"] = "live", ""
        elif row["name"] in self._processes and row["state"] in ("live", "empty"):
            row["state"] = "failed" if row["error"] else "stopped"
        return row

    def close(self) -> list[str]:
        """Stop all of them; gives the names of those that were going on."""
        going = {name: process for name, process in self._processes.items() if process.poll() is None}
        for process in going.values():
            process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + STOP_S
        for process in going.values():
            try:
                process.wait(max(0.1, until_s - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()
        return list(going)

    def _idle(self, name: str) -> Path:
        place = self._runs.place(name)
        if place is None:
            raise UsageError(f"there is no run {name[:100]!r} in {self._runs.directory}")
        if self.row(name)["state"] == "live":
            raise UsageError(f"{name} is going on; stop it first")
        return place

    def _spawn(self, name: str, place: Path, arguments: list[str]) -> None:
        """As the page's child: what the command line shows goes into a file of the run."""
        command = [sys.executable, "-P", "-m", "manyhands.dashboard.own_runs", str(os.getpid())]
        with open(place / TERMINAL, "ab", opener=not_through_links) as terminal:
            terminal.write(f"$ manyhands train {' '.join(arguments)} --out {place}\n".encode())
            terminal.flush()
            self._processes[name] = subprocess.Popen(
                [*command, "train", *arguments, "--out", str(place)],
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def main(arguments: list[str]) -> None:
    """`python -m manyhands.dashboard.own_runs PAGE train …`: the command, which ends when its page does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(arguments[0]):
        return  # the page ended before the kernel was told
    sys.argv = ["manyhands", *arguments[1:]]
    runpy.run_module("manyhands", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
