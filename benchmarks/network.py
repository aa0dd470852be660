"""Ours beside PyTorch DDP on emulated hosts with one worker each, in turns: seconds, bytes, processor time of a step.

python benchmarks/network.py
python benchmarks/network.py --jobs mlp --contenders ours ddp --mbit 100

Bytes are those that the kernel counted on each host's only interface, headers and acknowledgements included.
"""

import argparse
import statistics
from functools import partial
from typing import Any

from common import arguments, interleave, show, write
from jobs import JOBS, Job
from processes import run_on_hosts
from summaries import Findings, Measured, Ratio, ratio

from manyhands.lab.emulated_hosts import EmulatedHosts, available

SCRIPT = "network_worker.py"
BATCH = 32
WARM_UP = 3  # steps: the first one hears how many rows the others have
Turn = list[dict[str, Any]]

CONTENDERS = {
    "ours": ["ours"],
    "ours-int8": ["ours", "--codec", "int8"],
    "ours-one-bit": ["ours", "--codec", "one-bit"],
    "ours-power-sgd": ["ours", "--codec", "power-sgd"],
    "ddp": ["ddp"],
    "ddp-fp16": ["ddp", "--hook", "fp16"],
    "ddp-power-sgd": ["ddp", "--hook", "power-sgd"],
    "unconnected": ["plain"],
}
TITLES = {
    "ours": "ours",
    "ours-int8": "ours, int8",
    "ours-one-bit": "ours, one-bit",
    "ours-power-sgd": "ours, PowerSGD-4",
    "ddp": "DDP (Gloo)",
    "ddp-fp16": "DDP, fp16 hook",
    "ddp-power-sgd": "DDP, PowerSGD-4 hook, one bucket",
    "unconnected": "no communication",
}
AT_LEAST = {"mlp": 3.3, "alexnet": 2.7, "resnet50": 1.15, "vgg16": 1.1}  # of DDP's step ÷ ours, at 1 Gbit/s


def turn(words: list[str], job: str, options: argparse.Namespace) -> Turn:
    settings = ["--job", job, "--batch", str(BATCH), "--warm-up", str(WARM_UP), "--steps", str(options.steps)]
    with EmulatedHosts(options.hosts, bandwidth_mbit=options.mbit) as net:
        return run_on_hosts(net, list(range(options.hosts)), SCRIPT, [*words, *settings], {})


def step_s(each: Turn) -> float:
    """Of the slower host."""
    return max(statistics.median(worker["step_s"]) for worker in each)


def sent_mb(each: Turn, steps: int) -> float:
    return max(worker["sent_bytes"] for worker in each) / steps / 1e6


def processor_s(each: Turn, steps: int) -> float:
    return float(sum(worker["processor_s"] for worker in each)) / steps


def findings(name: str, job: Job, raw: dict[str, list[Turn]], options: argparse.Namespace) -> Findings:
    def of(number: Any) -> dict[str, list[float]]:
        return {TITLES[one]: [number(each) for each in turns] for one, turns in raw.items()}

    seconds = of(step_s)
    spent = of(partial(processor_s, steps=options.steps))
    ratios: list[Ratio] = []
    for other in raw:
        if other != "ours" and "ours" in raw:
            target = AT_LEAST.get(name) if other == "ddp" and options.mbit == 1000 else None
            ratios.append(ratio(f"{TITLES[other]} ÷ ours", seconds[TITLES[other]], seconds["ours"], target))
    return Findings(
        title=f"{job.title}, batch {BATCH}, {options.hosts} hosts × 1 worker, {options.mbit:g} Mbit/s",
        measured=[
            Measured(of=job.title, unit="s per step", values=seconds),
            Measured(
                of=job.title,
                unit="MB sent per host and step",
                values=of(partial(sent_mb, steps=options.steps)),
            ),
            Measured(of=job.title, unit="processor s per step, all workers", values=spent),
        ],
        ratios=ratios,
        notes=options.note,
    )


def main() -> None:
    parser = arguments("Steps of ours and of DDP on emulated hosts, taking turns.", rounds=5)
    jobs = ["mlp", "alexnet", "resnet50", "vgg16"]
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=jobs, metavar="JOB", help=", ".join(JOBS))
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        metavar="C",
        help=", ".join(CONTENDERS),
    )
    parser.add_argument("--hosts", type=int, default=2, help="default 2")
    parser.add_argument("--mbit", type=float, default=1000.0, help="each link's rate (default 1000)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per turn (default 6)")
    parser.add_argument("--note", nargs="*", default=[], help="goes into the summaries")
    options = parser.parse_args()
    if why := available():
        raise SystemExit(why)
    if options.quick:
        options.rounds, options.steps = 1, 2
    results: dict[str, Any] = {}
    found: dict[str, Findings] = {}
    for name in options.jobs:
        starts = {one: partial(turn, CONTENDERS[one], name, options) for one in options.contenders}
        raw = interleave(starts, options.rounds, name)
        title = f"network-{name}"
        found[title] = findings(name, JOBS[name], raw, options)
        show(found[title])
        results[name] = {"turns": raw, "ratios": [line.record() for line in found[title].ratios]}
        write(options, benchmark="network", results=results, summaries=found)


if __name__ == "__main__":
    main()
