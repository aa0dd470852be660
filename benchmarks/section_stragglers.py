"""Workers of which some are slow: throughput of sync, stale and async servers, and what accuracy it costs.

Compute is paced, and the same steps of the same workers are slow for all contenders. All use as many samples.
"""

import argparse
import statistics
from functools import partial
from typing import Any

from common import interleave, show
from processes import run_ours
from summaries import Findings, Measured, ratio

from manyhands.cluster.launcher.cores import CoreLayout

SYNC, STALE, ASYNC = "parameter-server:sync", "stale:bound=4", "parameter-server:async"
POINT = 1.0  # of accuracy

RANDOM = "random slow steps: one in five takes 5×"
ALWAYS = "one worker always 3× slower"

Turn = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=4, help="default 4")
    parser.add_argument("--steps", type=int, default=200, help="of each worker (default 200)")
    parser.add_argument("--step-s", type=float, default=0.04, help="paced compute of a step (default 0.04)")


def turn(strategy: str, steps: list[int], slowness: list[str], options: argparse.Namespace) -> Turn:
    settings = ["--strategy", strategy, "--step-s", str(options.step_s), *slowness]
    settings += ["--steps", *map(str, steps)]
    layout = CoreLayout(cores=((),) * options.workers, threads=1, server_cores=((),))
    return run_ours("straggler_worker.py", settings, layout, servers=1)


def contests(options: argparse.Namespace) -> dict[str, tuple[str, float, dict[str, Any]]]:
    """For each kind of slowness: who is compared with sync, the target, and how everyone is started."""
    steps, workers = options.steps, options.workers
    even = [steps] * workers
    # As many steps in all, divided as the workers' speeds are: who waits for nobody does not wait at the end either.
    fast = round(workers * steps * 3 / (3 * (workers - 1) + 1))
    uneven = [fast] * (workers - 1) + [workers * steps - fast * (workers - 1)]
    random = ["--chance", "0.2", "--times", "5"]
    always = ["--slow-worker", str(workers - 1), "--times", "3"]
    return {
        RANDOM: (
            STALE,
            1.4,
            {who: partial(turn, who, even, random, options) for who in (SYNC, STALE, ASYNC)},
        ),
        ALWAYS: (
            ASYNC,
            1.8,
            {
                SYNC: partial(turn, SYNC, even, always, options),
                ASYNC: partial(turn, ASYNC, uneven, always, options),
            },
        ),
    }


def samples_per_second(each: Turn) -> float:
    """From the first worker's start to the last one's end."""
    elapsed = max(worker["ended"] for worker in each) - min(worker["began"] for worker in each)
    return float(sum(worker["samples"] for worker in each)) / elapsed


def run(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Findings]]:
    if options.quick:
        options.rounds, options.steps, options.step_s = 1, 4, 0.001
    results, summaries = {}, {}
    for title in [ALWAYS] if options.quick else [RANDOM, ALWAYS]:
        who, target, starts = contests(options)[title]
        raw = interleave(starts, options.rounds, title)
        rates = {name: [samples_per_second(each) for each in turns] for name, turns in raw.items()}
        accuracy = {name: [each[0]["accuracy"] for each in turns] for name, turns in raw.items()}
        staleness = {name: raw[name][0][0]["staleness"] for name in raw}
        found = findings(title, who, target, rates, accuracy, staleness)
        show(found)
        results[title] = {
            "samples_per_second": rates,
            "accuracy": accuracy,
            "staleness": staleness,
            "ratios": [line.record() for line in found.ratios],
        }
        summaries["random" if title == RANDOM else "always"] = found
    return results, summaries


def findings(
    title: str,
    who: str,
    target: float,
    rates: dict[str, list[float]],
    accuracy: dict[str, list[float]],
    staleness: dict[str, Any],
) -> Findings:
    lost = 100 * (statistics.median(accuracy[SYNC]) - statistics.median(accuracy[who]))
    return Findings(
        title=title,
        counts={
            f"points of accuracy that {who} loses to {SYNC}": round(lost, 2),
            f"at most {POINT:g} lost": lost <= POINT,
        },
        measured=[
            Measured(of="speed", unit="samples/s", values=rates),
            Measured(
                of="accuracy on the digits",
                unit="%",
                values={name: [100 * value for value in each] for name, each in accuracy.items()},
            ),
            Measured(
                of="staleness, mean",
                unit="updates",
                values={name: [(each or {}).get("mean", 0.0)] for name, each in staleness.items()},
            ),
        ],
        ratios=[ratio(f"{who} ÷ {SYNC}", rates[who], rates[SYNC], target)],
    )
