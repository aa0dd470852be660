"""Peak memory of a worker whose model is sharded over 4, beside what a whole replica keeps."""

import argparse
from functools import partial
from typing import Any

from common import interleave, show
from placement_worker import JOBS
from processes import run_ours
from summaries import Findings, Measured, ratio

from manyhands.cluster.launcher import cores

WORKERS = 4
TARGET = 0.35
KEPT = 3  # vectors as long as the parameters: themselves, their gradients, momentum


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", choices=JOBS, default="mlp", metavar="JOB")
    parser.add_argument("--steps", type=int, default=4, help="steps (default 4)")


def run(options: argparse.Namespace) -> tuple[Any, dict[str, Findings]]:
    job = options.job
    if options.quick:
        options.rounds, job = 1, "small"
    arguments = ["--job", job, "--steps", str(options.steps), "--warm-up", "1"]
    layout = cores.layout(WORKERS, 1)
    contenders = {
        text: partial(run_ours, "placement_worker.py", [*arguments, "--placement", text], layout)
        for text in ("sharded", "single")
    }
    found = interleave(contenders, options.rounds, job)
    summary = findings(job, found)
    show(summary)
    return found, {"": summary}


def findings(job: str, found: dict[str, list[list[dict[str, Any]]]]) -> Findings:
    whole = [KEPT * turn[0]["weights_bytes"] / 1e6 for turn in found["sharded"]]
    peaks = {
        text: [max(worker["peak_bytes"] for worker in turn) / 1e6 for turn in turns]
        for text, turns in found.items()
    }
    title = f"peak memory of the largest of {WORKERS} workers, {JOBS[job].title}"
    replica = "parameters, gradients and momentum of a whole replica"
    return Findings(
        title=title,
        measured=[Measured(of=title, unit="MB", values={**peaks, replica: whole})],
        ratios=[
            ratio(f"{text} ÷ {replica}", each, whole, TARGET if text == "sharded" else None, at_most=True)
            for text, each in peaks.items()
        ],
    )
