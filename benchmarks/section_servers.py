"""One asynchronous parameter server and two workers on one host: ours, torch RPC, TensorFlow, and DDP as a yardstick.

All have the same cores, not pinned: three or four processes share them as the kernel sees fit. Workers have one thread.
"""

import argparse
import json
import math
import os
import statistics
from typing import Any

from common import say, show
from jobs import JOBS
from processes import HERE, free_ports, loopback, run_commands, run_each, run_ours
from summaries import Findings, Measured, ratio
from turns import Start, Turn, in_turns

from manyhands.cluster.launcher import cores
from manyhands.cluster.launcher.cores import CoreLayout

WORKERS = 2
BATCH = 32
WARM_UP = 3  # steps
TENSORFLOW = HERE.parent / ".peers" / "bin" / "python"

TITLES = {
    "ours": "ours, parameter-server:async",
    "rpc": "torch RPC server",
    "rpc-as-taught": "torch RPC server, as many threads as PyTorch takes",
    "tensorflow": "TensorFlow ParameterServerStrategy",
    "ddp": "DDP (Gloo)",
    "unconnected": "no communication",
}
TARGETS = {
    ("rpc", "mlp"): 3.0,
    ("rpc", "vgg16"): 2.0,
    ("tensorflow", "mlp"): 1.5,
    ("tensorflow", "alexnet"): 1.5,
}
DEFAULT_JOBS = ["mlp", "vgg16", "alexnet"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=DEFAULT_JOBS, metavar="JOB")
    parser.add_argument(
        "--contenders", nargs="+", choices=TITLES, default=list(TITLES), metavar="C", help=", ".join(TITLES)
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="timed steps of each worker per turn (default 8)"
    )


def runners(job: list[str]) -> dict[str, tuple[Start, int]]:
    """How each contender is started, and how many of its processes take turns."""
    everyone = CoreLayout(cores=((),) * WORKERS, threads=1, server_cores=((),))
    with_server = CoreLayout(cores=((),) * (WORKERS + 1), threads=1)
    as_taught = CoreLayout(cores=((),) * (WORKERS + 1), threads=len(os.sched_getaffinity(0)))
    ours = ["ours", "--strategy", "parameter-server:async"]
    script = "train_worker.py"
    return {
        "ours": (
            lambda more: run_ours(script, [*ours, *job, *more], everyone, servers=1, survives=True),
            WORKERS,
        ),
        "rpc": (lambda more: run_each(script, ["rpc", *job, *more], with_server, loopback()), WORKERS),
        "rpc-as-taught": (
            lambda more: run_each(script, ["rpc", *job, *more], as_taught, loopback()),
            WORKERS,
        ),
        "tensorflow": (lambda more: run_tensorflow([*job, *more]), 1),
        "ddp": (
            lambda more: run_each(script, ["ddp", *job, *more], cores.layout(WORKERS, 1), loopback()),
            WORKERS,
        ),
        "unconnected": (
            lambda more: run_each(script, ["plain", *job, *more], cores.layout(WORKERS, 1), {}),
            WORKERS,
        ),
    }


def run_tensorflow(job: list[str]) -> object:
    """A coordinator, a server and two workers, which are servers too and end when the coordinator has."""
    ports = iter(free_ports(WORKERS + 2))
    roles = [("worker", WORKERS), ("ps", 1), ("chief", 1)]
    cluster = {role: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for role, count in roles}
    script = [str(TENSORFLOW), str(HERE / "tensorflow_peer.py")]
    commands = [
        [*script, role, str(index), "--cluster", json.dumps(cluster), *job]
        for role, count in roles
        for index in range(count)
    ]
    # The last one decides when it is over: the others serve until they are ended.
    return run_commands(commands, {"OMP_NUM_THREADS": "1"})


def samples_per_second(turn: Turn) -> float:
    """Of all workers together, over all timed steps: slow ones count, for a server's peers too."""
    losses = [value for process in turn for value in process["losses"]]
    if not losses or not all(map(math.isfinite, losses)):
        raise SystemExit(f"a loss is not a finite number: {losses}")
    return float(sum(worker["batch"] / statistics.mean(worker["step_s"]) for worker in turn))


def able(contenders: list[str]) -> list[str]:
    """Those that can run here."""
    if "tensorflow" in contenders and not TENSORFLOW.exists():
        say(
            "TensorFlow is left out: it is not installed; `make peers` does that, in an environment of its own"
        )
        return [name for name in contenders if name != "tensorflow"]
    return contenders


def run(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Findings]]:
    if options.quick:
        options.rounds, options.steps = 1, 2
    contenders = able(options.contenders)
    results, summaries = {}, {}
    for name in options.jobs:
        started = {who: how for who, how in runners(["--job", name]).items() if who in contenders}
        raw = in_turns(started, name, rounds=options.rounds, steps=options.steps, warm_up=WARM_UP)
        summaries[name] = findings(name, raw)
        show(summaries[name])
        results[name] = {"turns": raw, "ratios": [line.record() for line in summaries[name].ratios]}
    return results, summaries


def findings(job: str, raw: dict[str, list[Turn]]) -> Findings:
    rates = {who: [samples_per_second(turn) for turn in turns] for who, turns in raw.items()}
    title = f"{JOBS[job].title}, batch {BATCH} per worker, {WORKERS} workers"
    values = {TITLES[who]: each for who, each in rates.items()}
    ratios = [
        ratio(f"ours ÷ {TITLES[other]}", rates["ours"], rates[other], TARGETS.get((other, job)))
        for other in rates
        if "ours" in rates and other != "ours"
    ]
    ratios += [
        ratio(f"{TITLES[other]} ÷ {TITLES['ddp']}", rates[other], rates["ddp"])
        for other in ("rpc", "tensorflow")
        if other in rates and "ddp" in rates
    ]
    return Findings(
        title=title, measured=[Measured(of=title, unit="samples/s", values=values)], ratios=ratios
    )
