"""Other people's loops on top of the session beside the session's own step, in turns: samples per second.

python benchmarks/adapters.py
.adapters/bin/python benchmarks/adapters.py     with Lightning and Hugging Face, which are left out where they are not
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import arguments, say, show, write
from jobs import ADAPTED, Job
from processes import run_each, run_ours
from summaries import Findings, Measured, Ratio, ratio
from training import processor_s, samples_per_second
from turns import Start, Turn, in_turns

from manyhands.cluster.launcher import cores

SCRIPT = "adapters_worker.py"
BATCH = {"resnet20": 64, "mlp": 64, "small-mlp": 16}
WARM_UP = 3  # steps
ENOUGH = 0.97

TITLES = {
    "native": "session.step",
    "native-clipped": "session.step, clip_norm",
    "halves": "session.backward, update",
    "prepared": "mh.prepare",
    "prepared-clipped": "mh.prepare, clip_grad_norm_",
    "ddp": "adapters.ddp",
    "ddp-clipped": "adapters.ddp, clip_grad_norm_",
    "fit": "mh.fit",
    "lightning": "Lightning",
    "trainer": "HF Trainer",
    "trainer-clipped": "HF Trainer, max_grad_norm",
    "plain-alone": "PyTorch without us",
    "lightning-alone": "Lightning without us",
    "trainer-alone": "HF Trainer without us",
}
NEEDS = {"lightning": "lightning", "trainer": "transformers"}
# Which package's own loop is beside which adapter with 1 worker.
BESIDE = {"native": "plain-alone", "lightning": "lightning-alone", "trainer": "trainer-alone"}


def present(contender: str) -> bool:
    """Whether the package that a contender needs is here."""
    package = NEEDS.get(contender.partition("-")[0])
    return package is None or find_spec(package) is not None


def runners(job: str, workers: int, contenders: list[str]) -> dict[str, tuple[Start, int]]:
    """How each contender is started, and its number of workers; what is without us is one process."""
    options = ["--job", job, "--batch", str(BATCH[job])]

    def ours(name: str) -> tuple[Start, int]:
        layout = cores.layout(workers, 1)
        return lambda more: run_ours(SCRIPT, [name, *options, *more], layout, survives=True), workers

    def alone(name: str) -> tuple[Start, int]:
        layout = cores.layout(1, 1)
        return lambda more: run_each(SCRIPT, [name, *options, *more], layout, {}), 1

    return {
        name: alone(name) if name.endswith("-alone") else ours(name)
        for name in contenders
        if workers == 1 or not name.endswith("-alone")
    }


def ratios(of: str, rates: dict[str, list[float]], spent: dict[str, list[float]]) -> list[Ratio]:
    """Of speeds; and, for a machine that others use as well, of processor time, turned round: above 1 the first one
    needs less."""
    pairs = []
    for name in rates:
        base = "native-clipped" if name.endswith("-clipped") else "native"
        if name not in BESIDE.values() and name != base and base in rates:
            pairs.append((name, base, ENOUGH if not name.startswith("native") else None))
        if BESIDE.get(name) in rates:
            pairs.append((name, BESIDE[name], None))
    speeds = [
        ratio(f"{TITLES[mine]} ÷ {TITLES[other]}", rates[mine], rates[other], target, of=of)
        for mine, other, target in pairs
    ]
    work = [
        ratio(
            f"{TITLES[mine]} ÷ {TITLES[other]}", spent[other], spent[mine], of=f"{of}, steps per processor s"
        )
        for mine, other, _ in pairs
    ]
    return speeds + work


def findings(job: Job, batch: int, raw: dict[int, dict[str, list[Turn]]]) -> Findings:
    """What the turns of a job's contenders say, with each number of workers."""
    rates, spent, found = [], [], []
    for workers, turns in raw.items():
        of = f"{workers} worker{'s' * (workers > 1)}"
        speed = {name: [samples_per_second(turn) for turn in each] for name, each in turns.items()}
        used = {name: [processor_s(turn) for turn in each] for name, each in turns.items()}
        rates.append(
            Measured(of=of, unit="samples/s", values={TITLES[name]: each for name, each in speed.items()})
        )
        shown = {TITLES[name]: each for name, each in used.items()}
        spent.append(Measured(of=of, unit="processor s per step, all workers", values=shown))
        found += ratios(of, speed, used)
    return Findings(
        title=f"{job.title}, batch {batch} per worker, SGD with momentum",
        measured=[*rates, *spent],
        ratios=found,
        notes=[] if present("trainer") else ["Lightning and Hugging Face are not installed here."],
    )


def measure(options: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    found: dict[str, Findings] = {}
    for name in options.jobs:
        raw: dict[int, dict[str, list[Turn]]] = {}
        for workers in options.workers:
            started = runners(name, workers, options.contenders)
            label = f"{name}, {workers} workers"
            raw[workers] = in_turns(
                started, label, rounds=options.rounds, steps=options.steps, warm_up=WARM_UP
            )
        title = f"adapters-{name}"
        found[title] = findings(ADAPTED[name], BATCH[name], raw)
        show(found[title])
        results[name] = {str(workers): turns for workers, turns in raw.items()}
        write(options, benchmark="adapters", results=results, summaries=found)


def main() -> None:
    parser = arguments("Samples per second of adapters beside the session's own step.", rounds=9)
    parser.add_argument("--jobs", nargs="+", choices=ADAPTED, default=["resnet20", "mlp"], metavar="JOB")
    parser.add_argument("--contenders", nargs="+", choices=TITLES, default=list(TITLES), metavar="C")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--steps", type=int, default=6, help="timed steps per turn (default 6)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 2
    missing = [name for name in options.contenders if not present(name)]
    if missing:
        say(f"{', '.join(missing)}: left out, the package is not installed for {sys.executable}")
        options.contenders = [name for name in options.contenders if name not in missing]
    # Where packages of the environment below find their libraries.
    os.environ.setdefault("LD_LIBRARY_PATH", str(Path(torch.__file__).parents[3]))
    measure(options)


if __name__ == "__main__":
    main()
