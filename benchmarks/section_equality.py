"""Every placement beside one process on the same samples: the largest relative difference after 20 steps."""

import argparse
from typing import Any

import torch
from common import say, show
from placement_worker import JOBS, build, make_batches
from processes import run_ours
from summaries import Findings, Measured

from manyhands.cluster.launcher import cores
from manyhands.job import declared

STEPS = 20
LIMIT = 1e-5
CASES = [
    *(f"pipeline:schedule={name}" for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")),
    *("tensor:ways=2", "sharded", "hybrid", "hybrid:pipeline=1", "hybrid:tensor=1"),
]
DEFAULT_JOBS = ["small", "lstm", "transformer"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=DEFAULT_JOBS, metavar="JOB")


def run(options: argparse.Namespace) -> tuple[Any, dict[str, Findings]]:
    """Plain SGD, whose steps do not depend on how gradients were rounded the step before."""
    results: dict[str, dict[str, float]] = {}
    for name in ["small"] if options.quick else options.jobs:
        whole = _alone(name)
        results[name] = {}
        for text in CASES[:1] if options.quick else CASES:
            workers = 4 if text == "hybrid" else 2
            say(f"{name}: {text}")
            found = run_ours(
                "equality_worker.py", ["--job", name, "--placement", text], cores.layout(workers, 1)
            )
            results[name][text] = max(
                float((torch.tensor(found[0]["params"][key]) - value).norm() / value.norm().clamp_min(1e-12))
                for key, value in whole.items()
            )
        found = findings(results)
        show(found)
    return results, {"": found}


def findings(results: dict[str, dict[str, float]]) -> Findings:
    differences = [value for each in results.values() for value in each.values()]
    return Findings(
        title=f"largest relative difference to one process after {STEPS} steps",
        counts={
            "comparisons": len(differences),
            f"within {LIMIT:g}": sum(value <= LIMIT for value in differences),
        },
        measured=[
            Measured(
                of=JOBS[name].title, unit="relative", values={text: [value] for text, value in each.items()}
            )
            for name, each in results.items()
        ],
    )


def _alone(name: str) -> dict[str, torch.Tensor]:
    work = JOBS[name]
    model = build(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = make_batches(work, work.batch)
    for number in range(STEPS):
        optimizer.zero_grad()
        declared.loss(model, batches[number % len(batches)]).backward()
        optimizer.step()
    return {key: value.detach() for key, value in model.named_parameters()}
