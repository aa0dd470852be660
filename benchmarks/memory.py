"""Peak memory of the host while AlexNet trains with momentum in 4 workers: ours beside DDP.

python benchmarks/memory.py

Memory is the sum of PSS over the workers: a page that several processes map is counted once, in parts. The launchers
(torchrun's has PyTorch loaded) are given besides.
"""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import arguments, interleave, show, write
from processes import Launcher, launch, run_launched, torchrun
from summaries import Findings, Measured, ratio

TARGET = 0.6
TITLES = {
    "workers_bytes": "workers, during the steps",
    "workers_life_bytes": "workers, at any time",
    "launcher_bytes": "launcher",
    "available_drop_bytes": "drop of MemAvailable",
}
EVERY_S = 0.05


@dataclass(kw_only=True)
class Samples:
    """Memory of one contender over time, in bytes."""

    available_before: int = field(default_factory=lambda: _kilobytes(Path("/proc/meminfo"), "MemAvailable"))
    at: list[float] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    launcher: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def take(self, launcher: int) -> None:
        self.at.append(time.monotonic())
        self.launcher.append(pss(launcher))
        self.workers.append(sum(map(pss, descendants(launcher))))
        self.dropped.append(self.available_before - _kilobytes(Path("/proc/meminfo"), "MemAvailable"))

    def peaks(self, start: float, end: float) -> dict[str, int]:
        """The peaks during the steps, and over the whole life of the workers."""
        during = [index for index, at in enumerate(self.at) if start <= at <= end]
        if not during:
            raise SystemExit("the steps were over before memory could be looked at; take more with --steps")
        return {
            "workers_bytes": max(self.workers[index] for index in during),
            "launcher_bytes": max(self.launcher[index] for index in during),
            "available_drop_bytes": max(self.dropped[index] for index in during),
            "workers_life_bytes": max(self.workers),
            "samples": len(during),
        }


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
    return 0


def _kilobytes(path: Path, name: str) -> int:
    """The bytes of a line like `Pss:  123 kB`; a process that is ending has none."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def peak(contender: str, launcher: Launcher, options: list[str]) -> dict[str, Any]:
    samples = Samples()
    workers = run_launched(
        launcher, "train_worker.py", [contender, *options], watch=samples.take, every_s=EVERY_S
    )
    start = min(worker["at"][0] for worker in workers)
    end = max(worker["at"][-1] for worker in workers)
    return {**samples.peaks(start, end), "steps": len(workers[0]["step_s"])}


def main() -> None:
    parser = arguments("Peak memory of the host, AlexNet with momentum, 4 workers.", rounds=3)
    parser.add_argument("--workers", type=int, default=4, help="default 4")
    parser.add_argument("--steps", type=int, default=6, help="steps per turn (default 6)")
    options = parser.parse_args()
    job = "alexnet"
    if options.quick:
        job, options.rounds, options.steps = "small-mlp", 1, 300
    flags = ["--job", job, "--steps", str(options.steps)]
    peaks = interleave(
        {
            "ours": lambda: peak("ours", launch(options.workers), flags),
            "ddp": lambda: peak("ddp", torchrun(options.workers), flags),
        },
        options.rounds,
        f"{job}, {options.workers} workers",
    )
    found = findings(f"peak memory of {job}, {options.workers} workers", peaks)
    show(found)
    results = {"peaks": peaks, "ratios": [line.record() for line in found.ratios]}
    write(options, benchmark="memory", results=results, summaries={"memory": found})


def findings(title: str, peaks: dict[str, list[dict[str, Any]]]) -> Findings:
    def megabytes(contender: str, name: str) -> list[float]:
        return [turn[name] / 1e6 for turn in peaks[contender]]

    return Findings(
        title=title,
        measured=[
            Measured(of=of, unit="MB", values={who: megabytes(who, name) for who in peaks})
            for name, of in TITLES.items()
        ],
        ratios=[
            ratio(
                "ours ÷ DDP",
                megabytes("ours", name),
                megabytes("ddp", name),
                TARGET if name == "workers_bytes" else None,
                at_most=True,
                of=of,
            )
            for name, of in TITLES.items()
        ],
    )


if __name__ == "__main__":
    main()
