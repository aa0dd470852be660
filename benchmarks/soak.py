"""A long run of a tiny model, looked at from outside: nothing that it holds may grow after a warm-up.

python benchmarks/soak.py --minutes 30

Memory (proportional set size), descriptors, threads and shared memory are sums over the processes of the run, sampled
over time. Of each, the median of the last fifth is held against that of the second fifth, and the directory of the run
against the bound of docs/commands.md. Exit code 1 if any grows.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, mode
from tempfile import TemporaryDirectory
from typing import Any

from common import arguments, say, show, write
from memory import descendants, pss
from processes import HERE, SCRIPTS
from summaries import Findings, Measured, ratio

STRATEGIES = ("all-reduce", "parameter-server:async")
WORKERS = 2
SAMPLES = 200
# What a process may have more at the end and not grow: allocators and caches fill for a while.
MOST = {"memory_bytes": 1.02, "descriptors": 1.0, "threads": 1.0, "shared_bytes": 1.0}
UNITS = {
    "memory_bytes": "MB",
    "descriptors": "",
    "threads": "",
    "shared_bytes": "MB",
    "directory_bytes": "MB",
}
STEP_LINE, SECOND_LINE, LOG_LINE, EVENT_LINE = 350, 150, 150, 250
FULL, GROWTH_BYTES = 4096, 16 << 20
CHECKPOINTS_BYTES = 4 << 20  # three, one that is being written, plan and summary: the model is tiny


@dataclass(frozen=True, kw_only=True)
class Look:
    """The whole run at one moment."""

    at_s: float
    memory_bytes: int
    descriptors: int
    threads: int
    shared_bytes: int
    directory_bytes: int
    processes: int


class Looks:
    """Samples of a run over time, in a directory of its own."""

    def __init__(self, run: Path, every_s: float) -> None:
        self.taken: list[Look] = []
        self._run = run
        self._every_s = every_s
        self._next_s = 0.0

    def take(self, launcher: int) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._every_s
        pids = [launcher, *descendants(launcher)]
        self.taken.append(
            Look(
                at_s=time.monotonic(),
                memory_bytes=sum(map(pss, pids)),
                descriptors=sum(_entries(pid, "fd") for pid in pids),
                threads=sum(_entries(pid, "task") for pid in pids),
                shared_bytes=_shared(pids),
                directory_bytes=_size(self._run),
                processes=len(pids),
            )
        )


def _entries(pid: int, folder: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{folder}"))
    except OSError:
        return 0


def _shared(pids: Sequence[int]) -> int:
    """Memory behind descriptors, each once."""
    found = {}
    for pid in pids:
        for number in range(256):
            path = f"/proc/{pid}/fd/{number}"
            try:
                if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                    status = os.stat(path)
                    found[status.st_ino] = status.st_blocks * 512
            except OSError:
                continue
    return sum(found.values())


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:  # just removed
                continue
    return total


def soak(strategy: str, seconds: float, run: Path) -> dict[str, Any]:
    """One run, and its samples without those of start and end."""
    looks = Looks(run, seconds / SAMPLES)
    served = strategy.startswith("parameter-server")
    words = [str(SCRIPTS / "manyhands"), "launch", "--workers", str(WORKERS), "--threads", "1"]
    words += ["--strategy", strategy, "--out", str(run), *(["--servers", "1"] if served else [])]
    command = [*words, str(HERE / "soak_worker.py"), str(seconds)]
    with subprocess.Popen(
        command, env=os.environ, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        try:
            while launcher.poll() is None:
                looks.take(launcher.pid)
                time.sleep(0.2)
        finally:
            launcher.terminate()
    if launcher.returncode:
        sys.exit(f"{strategy}: the run has ended with exit code {launcher.returncode}")
    summary = json.loads((run / "summary.json").read_text())
    usual = mode(look.processes for look in looks.taken)  # a checkpoint's writer comes and goes
    taken = [asdict(look) for look in looks.taken if look.processes == usual]
    return {
        "looks": taken,
        "steps": summary["steps"],
        "epochs": summary["steps"] // 8,
        "wall_s": summary["wall_s"],
    }


def parts(looks: Sequence[Mapping[str, float]], name: str) -> tuple[float, float]:
    """The medians of the second fifth and of the last one."""
    fifth = max(1, len(looks) // 5)
    return median(look[name] for look in looks[fifth : 2 * fifth]), median(
        look[name] for look in looks[-fifth:]
    )


def directory_bound(steps: int, epochs: int, seconds: float, processes: int) -> float:
    """As docs/commands.md has it, for every process that records; events and checkpoints come on top."""

    def thinned(count: float) -> float:
        return FULL * (1 + math.log2(max(2 * FULL, count) / FULL))

    each = thinned(steps) * STEP_LINE + thinned(seconds) * SECOND_LINE + thinned(steps) * LOG_LINE
    return processes * (2 * each + GROWTH_BYTES + EVENT_LINE * epochs / 20) + CHECKPOINTS_BYTES


def main() -> None:
    parser = arguments("A long run of a tiny model: nothing may grow.", rounds=1)
    parser.add_argument("--minutes", type=float, default=30.0, help="of all runs together (default 30)")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.strategies = 0.2, options.strategies[:1]
    seconds = 60 * options.minutes / len(options.strategies)
    ran = {}
    for strategy in options.strategies:
        say(f"{strategy}: {seconds:.0f} s")
        with TemporaryDirectory() as name:
            ran[strategy] = soak(strategy, seconds, Path(name) / "run")
    found = findings(ran)
    show(found)
    write(options, benchmark="soak", results=ran, summaries={"soak": found})
    grown = [
        f"{line.of}: {line.median:.3f} > {line.target:g}" for line in found.ratios if line.reached is False
    ]
    if grown and not options.quick:
        sys.exit("it grows: " + "; ".join(grown))


def findings(ran: dict[str, dict[str, Any]]) -> Findings:
    measured, ratios = [], []
    for strategy, found in ran.items():
        for name in (*MOST, "directory_bytes"):
            scale = 1e6 if name.endswith("bytes") else 1
            early, late = parts(found["looks"], name)
            what = f"{strategy}: {name.removesuffix('_bytes').replace('_', ' ')}"
            values = {"second fifth": [early / scale], "last fifth": [late / scale]}
            measured.append(Measured(of=what, unit=UNITS[name], values=values))
            if name in MOST:
                ratios.append(
                    ratio("last ÷ second fifth", [late], [max(early, 1)], MOST[name], at_most=True, of=what)
                )
        most = max(look["directory_bytes"] for look in found["looks"])
        bound = directory_bound(found["steps"], found["epochs"], found["wall_s"], WORKERS + 1)
        ratios.append(
            ratio("largest ÷ bound", [most], [bound], 1.0, at_most=True, of=f"{strategy}: directory")
        )
    counts = {
        strategy: {name: found[name] for name in ("steps", "epochs", "wall_s")}
        | {"looks": len(found["looks"])}
        for strategy, found in ran.items()
    }
    return Findings(
        title=f"{WORKERS} workers train a tiny model, evaluate and save",
        measured=measured,
        ratios=ratios,
        counts=counts,
    )


if __name__ == "__main__":
    main()
