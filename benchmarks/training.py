"""Ours beside PyTorch DDP, two unconnected processes, and plain PyTorch, in turns: samples per second.

python benchmarks/training.py --out training.json
python benchmarks/training.py --jobs mlp resnet50 --contenders ours ddp
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from common import RATIO_HEADER, Ratio, arguments, interleave, ratio, say, table, write
from jobs import JOBS, Job
from processes import loopback, run_each, run_ours

from manyhands.cluster import cores

BATCH = 32
OURS = ("ours", "ours-alone")
WITHIN = 0.98  # one worker of ours beside plain PyTorch

TITLES = {
    "ours": "ours, 2 workers",
    "ddp": "DDP (Gloo), 2 workers",
    "unconnected": "no communication, 2 processes",
    "in-step": "no communication, each waiting for the slower",
    "two-threads": "plain PyTorch, 2 threads",
    "ours-mortal": "ours, 2 workers, if one's death were the end",
    "ours-alone": "ours, 1 worker",
    "plain-alone": "plain PyTorch, 1 thread",
}

Runner = Callable[[list[str]], list[dict[str, Any]]]


def runners(keep_memory: bool) -> dict[str, Runner]:
    """How each contender is started, given the options of the job."""
    pair, alone, wide = cores.layout(2, 1), cores.layout(1, 1), cores.layout(1, 2)
    script = "train_worker.py"
    peers = ["--keep-memory"] if keep_memory else []
    return {
        "ours": lambda job: run_ours(script, ["ours", *job], pair, survives=True),
        "ours-mortal": lambda job: run_ours(script, ["ours", *job], pair),
        "ddp": lambda job: run_each(script, ["ddp", *peers, *job], pair, loopback()),
        "unconnected": lambda job: run_each(script, ["plain", *peers, *job], pair, {}),
        "two-threads": lambda job: run_each(
            script, ["plain", *peers, *job, "--batch", str(2 * BATCH)], wide, {}
        ),
        "ours-alone": lambda job: run_ours(script, ["ours", *job], alone),
        "plain-alone": lambda job: run_each(script, ["plain", *peers, *job], alone, {}),
    }


def samples_per_second(workers: list[dict[str, Any]]) -> float:
    """Over all processes of a contender, each at its median step."""
    losses = [value for worker in workers for value in worker["losses"]]
    if not losses or not all(map(math.isfinite, losses)):
        raise SystemExit(f"a loss is not a finite number: {losses}")
    return float(sum(worker["batch"] / statistics.median(worker["step_s"]) for worker in workers))


def in_step(pair: list[dict[str, Any]]) -> float:
    """What two unconnected processes would make if a step took both as long as the slower one, and nothing else
    changed: what is left, of the same compute, by waiting for each other on a machine as uneven as this."""
    slower_s = [max(each) for each in zip(*(worker["step_s"] for worker in pair), strict=True)]
    return float(sum(worker["batch"] for worker in pair) / statistics.median(slower_s))


def ratios(job: Job, rates: dict[str, list[float]]) -> list[Ratio]:
    pairs = [("ours", other) for other in ("ddp", "unconnected", "two-threads", "ours-mortal")]
    pairs += [("in-step", "unconnected"), ("ours", "in-step"), ("ours-alone", "plain-alone")]
    targets = {**job.targets, "plain-alone": WITHIN} if job.targets else {}
    return [
        ratio(
            f"{TITLES[mine]} ÷ {TITLES[other]}",
            rates[mine],
            rates[other],
            targets.get(other) if mine in OURS else None,
        )
        for mine, other in pairs
        if mine in rates and other in rates
    ]


def main() -> None:
    parser = arguments("Samples per second of ours, DDP and plain PyTorch, taking turns.")
    wanted = [name for name, job in JOBS.items() if job.targets]
    parser.add_argument(
        "--jobs", nargs="+", choices=JOBS, default=wanted, metavar="JOB", help=", ".join(JOBS)
    )
    contenders = list(runners(False))
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=contenders,
        default=contenders,
        metavar="C",
        help=", ".join(contenders),
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps per turn (default 10)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those (default 3)")
    parser.add_argument(
        "--keep-memory", action="store_true", help="let the others keep freed memory too, as our workers do"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.warm_up = 1, 2, 1
    say(cores.text(cores.layout(2, 1)))
    results = {}
    for name in options.jobs:
        job = JOBS[name]
        settings = ["--job", name, "--steps", str(options.steps), "--warm-up", str(options.warm_up)]
        started = {
            contender: partial(runner, settings)
            for contender, runner in runners(options.keep_memory).items()
            if contender in options.contenders
        }
        raw = interleave(started, options.rounds, name)
        rates = {contender: [samples_per_second(turn) for turn in turns] for contender, turns in raw.items()}
        if "unconnected" in raw:
            rates["in-step"] = [in_step(turn) for turn in raw["unconnected"]]
        found = ratios(job, rates)
        speeds = [
            [TITLES[c], f"{statistics.median(r):.1f}", f"{min(r):.1f}–{max(r):.1f}"] for c, r in rates.items()
        ]
        print(table(f"{job.title}, batch {BATCH} per worker", ["samples/s", "median", "per round"], speeds))
        print(table("", RATIO_HEADER, [line.cells() for line in found]), flush=True)
        results[name] = {
            "samples_per_second": rates,
            "ratios": [line.record() for line in found],
            "turns": raw,
        }
        write(options, benchmark="training", results=results)


if __name__ == "__main__":
    main()
