"""Pipelines on 2 workers × 1 thread beside one worker × 1 thread: samples/s and idle time, by microbatches."""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from common import RATIO_HEADER, interleave, ratio, table
from placement_worker import JOBS
from processes import loopback, run_each, run_ours

from manyhands.cluster import cores

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


def run(options: argparse.Namespace) -> Any:
    """Every setting takes its turn in every round."""
    jobs = ["small"] if options.quick else options.jobs
    steps = ["--steps", "2"] if options.quick else ["--steps", str(options.steps)]
    warm_up = ["--warm-up", "1" if options.quick else str(options.warm_up)]
    results = {}
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
        print(_table(name, found))
        results[name] = found
    return results


def _run(arguments: Sequence[str], placement: str, workers: int) -> list[dict[str, Any]]:
    layout = cores.layout(workers, 1)
    return run_ours("placement_worker.py", [*arguments, "--placement", placement], layout)


def _peer(arguments: Sequence[str], schedule: str, micros: int) -> list[dict[str, Any]]:
    words = [*arguments, "--schedule", schedule, "--microbatches", str(micros)]
    return run_each("pipelining_peer.py", words, cores.layout(STAGES, 1), loopback())


def _table(job: str, found: dict[str, list[list[dict[str, Any]]]]) -> str:
    speeds = {name: [turn[0]["samples_per_s"] for turn in turns] for name, turns in found.items()}
    pipelines = [name for name in speeds if name not in ("one worker", YARDSTICK)]
    ours = [name for name in pipelines if not name.startswith("torch ")]
    best = max(ours, key=lambda name: statistics.median(speeds[name]))
    rows = []
    for name in (YARDSTICK, *pipelines):
        own = speeds[name]
        if name == YARDSTICK:
            rows.append([*ratio(f"{name} ÷ one worker", own, speeds["one worker"]).cells(), "", ""])
            continue
        target = TARGETS.get(job) if name == best else None
        cells = ratio(f"{name} microbatches ÷ one worker", own, speeds["one worker"], target).cells()
        idle = statistics.median(
            statistics.mean(worker["wait_s"] / worker["wall_s"] for worker in turn) for turn in found[name]
        )
        micros = int(name.rpartition(" ")[2])
        rows.append([*cells, f"{idle:.2f}", f"{(STAGES - 1) / (micros + STAGES - 1):.2f}"])
    return table(JOBS[job].title, [*RATIO_HEADER, "idle", "(p−1)/(m+p−1)"], rows)
