"""Ours beside PyTorch DDP, two unconnected processes, and plain PyTorch, in turns: samples per second.

python benchmarks/training.py
python benchmarks/training.py --jobs mlp resnet50 --contenders ours ddp
python benchmarks/training.py --before cb3a127     ours beside ours as it was at that commit
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import arguments, say, show, write
from jobs import JOBS, Job
from processes import loopback, run_each, run_ours
from summaries import Findings, Measured, Ratio, ratio
from turns import Start, Turn, in_turns

from manyhands.cluster.launcher import cores
from manyhands.cluster.launcher.cores import CoreLayout

ROOT = Path(__file__).parent.parent
SCRIPT = "train_worker.py"
BATCH = 32
WARM_UP = 3  # steps
OURS = ("ours", "ours-alone")
WITHIN = 0.98  # one worker of ours beside plain PyTorch

TITLES = {
    "ours": "ours, 2 workers",
    "ddp": "DDP (Gloo), 2 workers",
    "unconnected": "no communication, 2 processes",
    "in-step": "no communication, each waiting for the slower",
    "two-threads": "plain PyTorch, 2 threads",
    "before": "ours at an earlier commit, 2 workers",
    "ours-mortal": "ours, 2 workers, if one's death were the end",
    "ours-alone": "ours, 1 worker",
    "plain-alone": "plain PyTorch, 1 thread",
}


def runners(job: list[str], keep_memory: bool = False) -> dict[str, tuple[Start, int]]:
    """How each contender is started, and how many workers it has."""
    pair, alone, wide = cores.layout(2, 1), cores.layout(1, 1), cores.layout(1, 2)
    peers = [*job, "--keep-memory"] if keep_memory else job

    def ours(layout: CoreLayout, *, survives: bool = False) -> tuple[Start, int]:
        def start(more: list[str]) -> object:
            return run_ours(SCRIPT, ["ours", *job, *more], layout, survives=survives)

        return start, len(layout.cores)

    def theirs(kind: str, layout: CoreLayout, batch: int = BATCH) -> tuple[Start, int]:
        def start(more: list[str]) -> object:
            return run_each(SCRIPT, [kind, "--batch", str(batch), *peers, *more], layout, loopback())

        return start, len(layout.cores)

    return {
        "ours": ours(pair, survives=True),
        "ours-mortal": ours(pair),
        "ddp": theirs("ddp", pair),
        "unconnected": theirs("plain", pair),
        "two-threads": theirs("plain", wide, 2 * BATCH),
        "ours-alone": ours(alone),
        "plain-alone": theirs("plain", alone),
    }


@contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """A folder with the files of a commit, gone afterwards; without one, this folder."""
    if commit is None:
        yield ROOT
        return
    with TemporaryDirectory() as name:
        folder = Path(name) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def earlier(folder: Path, job: list[str]) -> tuple[Start, int]:
    """Ours as another checkout of it is, by that checkout's own benchmark."""

    def start(more: list[str]) -> object:
        code = "import sys, training; training.runners(sys.argv[1:3])['ours'][0](sys.argv[3:])"
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", code, *job, *more]
        return subprocess.run(command, cwd=folder / "benchmarks", env=environ, check=True)

    return start, 2


def samples_per_second(workers: list[dict[str, Any]]) -> float:
    """Over all processes of a contender."""
    losses = [value for worker in workers for value in worker["losses"]]
    if not losses or not all(map(math.isfinite, losses)):
        raise SystemExit(f"a loss is not a finite number: {losses}")
    return float(sum(worker["batch"] / statistics.mean(worker["step_s"]) for worker in workers))


def in_step(pair: list[dict[str, Any]]) -> float:
    """What two unconnected processes would make if a step took both as long as the slower one, and nothing else
    changed: what is left, of the same compute, by waiting for each other on a machine as uneven as this."""
    slower_s = [max(each) for each in zip(*(worker["step_s"] for worker in pair), strict=True)]
    return float(sum(worker["batch"] for worker in pair) / statistics.mean(slower_s))


def ratios(job: Job, rates: dict[str, list[float]]) -> list[Ratio]:
    others = ("before", "ddp", "unconnected", "two-threads", "ours-mortal")
    pairs = [("ours", other) for other in others]
    pairs += [("in-step", "unconnected"), ("ours", "in-step"), ("ours-alone", "plain-alone")]
    targets = {**job.targets, "plain-alone": WITHIN} if job.targets else {}
    return [
        ratio(
            f"{TITLES[mine]} ÷ {TITLES[other]}",
            rates[mine],
            rates[other],
            targets.get(other) if mine in OURS else None,
            of=job.title,
        )
        for mine, other in pairs
        if mine in rates and other in rates
    ]


def processor_s(turn: Turn) -> float:
    """Of all workers together, for one step; the clock also ran in the step that does not count."""
    return float(sum(worker["processor_s"] / (len(worker["step_s"]) + 1) for worker in turn))


def findings(job: Job, raw: dict[str, list[Turn]]) -> Findings:
    """What the turns of a job's contenders say."""
    rates = {contender: [samples_per_second(turn) for turn in turns] for contender, turns in raw.items()}
    if "unconnected" in raw:
        rates["in-step"] = [in_step(turn) for turn in raw["unconnected"]]
    measured = [
        Measured(of=job.title, unit="samples/s", values={TITLES[name]: each for name, each in rates.items()})
    ]
    if all("processor_s" in worker for turns in raw.values() for turn in turns for worker in turn):
        spent = {TITLES[name]: [processor_s(turn) for turn in turns] for name, turns in raw.items()}
        measured.append(Measured(of=job.title, unit="processor s per step, all workers", values=spent))
    title = f"{job.title}, batch {BATCH} per worker"
    return Findings(title=title, measured=measured, ratios=ratios(job, rates))


def main() -> None:
    parser = arguments("Samples per second of ours, DDP and plain PyTorch, taking turns.", rounds=9)
    wanted = [name for name, job in JOBS.items() if job.targets]
    parser.add_argument(
        "--jobs", nargs="+", choices=JOBS, default=wanted, metavar="JOB", help=", ".join(JOBS)
    )
    contenders = list(runners([]))
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=contenders,
        default=contenders,
        metavar="C",
        help=", ".join(contenders),
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps per turn (default 4)")
    parser.add_argument(
        "--keep-memory", action="store_true", help="let the others keep freed memory too, as our workers do"
    )
    parser.add_argument("--before", metavar="COMMIT", help="only ours, and ours as it was at that commit")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 2
    say(cores.text(cores.layout(2, 1)))
    with checkout(options.before) as folder:
        measure(options, folder)


def measure(options: argparse.Namespace, folder: Path) -> None:
    results: dict[str, Any] = {}
    found: dict[str, Findings] = {}
    for name in options.jobs:
        job, title = JOBS[name], f"training-{name}"
        possible = runners(["--job", name], options.keep_memory)
        started = {contender: how for contender, how in possible.items() if contender in options.contenders}
        if options.before:
            started = {"before": earlier(folder, ["--job", name]), "ours": possible["ours"]}
            title = f"before-{name}"
        raw = in_turns(started, name, rounds=options.rounds, steps=options.steps, warm_up=WARM_UP)
        found[title] = findings(job, raw)
        show(found[title])
        results[name] = {"turns": raw, "ratios": [line.record() for line in found[title].ratios]}
        write(options, benchmark="training", results=results, summaries=found)


if __name__ == "__main__":
    main()
