"""Peak memory of a worker whose model is sharded over 4, beside what a whole replica keeps."""

import argparse
import statistics
from functools import partial
from typing import Any

from common import RATIO_HEADER, interleave, ratio, table
from placement_worker import JOBS
from processes import run_ours

from manyhands.cluster import cores

WORKERS = 4
TARGET = 0.35
KEPT = 3  # vectors as long as the parameters: themselves, their gradients, momentum


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", choices=JOBS, default="mlp", metavar="JOB")
    parser.add_argument("--steps", type=int, default=4, help="steps (default 4)")


def run(options: argparse.Namespace) -> Any:
    job = "small" if options.quick else options.job
    arguments = ["--job", job, "--steps", str(options.steps), "--warm-up", "1"]
    layout = cores.layout(WORKERS, 1)
    contenders = {
        text: partial(run_ours, "placement_worker.py", [*arguments, "--placement", text], layout)
        for text in ("sharded", "single")
    }
    found = interleave(contenders, options.rounds, job)
    whole = [KEPT * turn[0]["weights_bytes"] for turn in found["sharded"]]
    rows = []
    for text, turns in found.items():
        peaks = [max(worker["peak_bytes"] for worker in turn) for turn in turns]
        target = TARGET if text == "sharded" else None
        rows.append(ratio(f"{text}: peak of the largest worker", peaks, whole, target, at_most=True).cells())
    size = statistics.median(whole) / 1e6
    print(table(f"{JOBS[job].title}, {WORKERS} workers; a whole replica: {size:.0f} MB", RATIO_HEADER, rows))
    return found
