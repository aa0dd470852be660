"""Pipelines on 2 workers × 1 thread beside one worker × 1 thread: samples/s and idle time, by microbatches."""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from common import interleave, show
from placement_worker import JOBS
from processes import loopback, run_each, run_ours
from summaries import Findings, Measured, ratio

from manyhands.cluster.launcher import cores

TARGETS = {"vgg16": 1.4, "transformer": 1.4}
DEFAULT_JOBS = ["vgg16", "resnet50", "lstm", "transformer"]
STAGES = 2
PEER = ("gpipe", "1f1b")  # of which torch has the same
YARDSTICK = f"{STAGES} replicas"  # what the machine gains from a second worker at all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=DEFAULT_JOBS, metavar="JOB")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 2, 4, 8], metavar="M")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step (default 256)")
    parser.add_argument("--schedules", nargs="+", default=["1f1b"], metavar="S")
    parser.add_argument("--peer", action="store_true", help="torch.distributed.pipelining over Gloo as well")
    parser.add_argument("--steps", type=int, default=2, help="timed steps per turn (default 2)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those (default 1)")


def run(options: argparse.Namespace) -> tuple[Any, dict[str, Findings]]:
    """Every setting takes its turn in every round."""
    jobs = options.jobs
    if options.quick:
        options.rounds, options.microbatches, jobs = 1, [2], ["small"]
    steps = ["--steps", "2"] if options.quick else ["--steps", str(options.steps)]
    warm_up = ["--warm-up", "1" if options.quick else str(options.warm_up)]
    results, summaries = {}, {}
    for name in jobs:
        arguments = ["--job", name, *steps, *warm_up]
        batch = ["--batch", "8" if options.quick else str(options.batch)]
        half = ["--batch", "4" if options.quick else str(options.batch // STAGES)]
        contenders = {
            "one worker": partial(_run, [*arguments, *batch], "single", 1),
            YARDSTICK: partial(_run, [*arguments, *half], "single", STAGES),
        }
        arguments += batch
        for schedule in options.schedules:
            for micros in options.microbatches:
                text = f"pipeline:stages={STAGES},microbatches={micros},schedule={schedule}"
                contenders[f"{schedule}, {micros}"] = partial(_run, arguments, text, STAGES)
                if options.peer and schedule in PEER:
                    contenders[f"torch {schedule}, {micros}"] = partial(_peer, arguments, schedule, micros)
        found = interleave(contenders, options.rounds, name)
        results[name] = found
        summaries[name] = findings(name, found, 8 if options.quick else options.batch)
        show(summaries[name])
    return results, summaries


def _run(arguments: Sequence[str], placement: str, workers: int) -> list[dict[str, Any]]:
    layout = cores.layout(workers, 1)
    return run_ours("placement_worker.py", [*arguments, "--placement", placement], layout)


def _peer(arguments: Sequence[str], schedule: str, micros: int) -> list[dict[str, Any]]:
    words = [*arguments, "--schedule", schedule, "--microbatches", str(micros)]
    return run_each("pipelining_peer.py", words, cores.layout(STAGES, 1), loopback())


def findings(job: str, found: dict[str, list[list[dict[str, Any]]]], batch: int) -> Findings:
    """Speeds beside one worker's, and the part of the time that workers idle beside (p−1)/(m+p−1)."""
    speeds = {name: [turn[0]["samples_per_s"] for turn in turns] for name, turns in found.items()}
    pipelines = [name for name in speeds if name not in ("one worker", YARDSTICK)]
    ours = [name for name in pipelines if not name.startswith("torch ")]
    best = max(ours, key=lambda name: statistics.median(speeds[name]))
    title = f"{JOBS[job].title}, batch {batch}, {STAGES} stages; names are schedule, microbatches"
    idle = [
        Measured(
            of=name,
            unit="idle part of the time",
            values={
                "measured": [
                    statistics.mean(worker["wait_s"] / worker["wall_s"] for worker in turn)
                    for turn in found[name]
                ],
                "formula": [(STAGES - 1) / (int(name.rpartition(" ")[2]) + STAGES - 1)],
            },
        )
        for name in pipelines
    ]
    return Findings(
        title=title,
        measured=[Measured(of=title, unit="samples/s", values=speeds), *idle],
        ratios=[
            ratio(
                f"{name} ÷ one worker",
                speeds[name],
                speeds["one worker"],
                TARGETS.get(job) if name == best else None,
            )
            for name in (YARDSTICK, *pipelines)
        ],
    )
