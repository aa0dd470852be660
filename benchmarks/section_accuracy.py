"""Accuracy of every strategy with 4 workers on the digits, after the epochs that docs/comparing-fairly.md gives it."""

import argparse
import json
import statistics
import subprocess
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from common import interleave, show
from processes import SCRIPTS
from summaries import Findings, Measured

from manyhands import strategies
from manyhands.strategies import PRESETS, STRATEGIES

WORKERS = 4
TARGET = 0.96
SETTINGS = ["parameter-server:async", "worker-groups:groups=4", "worker-groups:groups=4,server_groups=2"]
NAMES = [*STRATEGIES, *PRESETS, *SETTINGS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", default=NAMES, metavar="S", help="default: all that there are"
    )


def train(name: str, seeds: list[int], more: list[str]) -> dict[str, Any]:
    """As a person does it; each turn has another seed, the same for all strategies."""
    workers = 1 if name == "single" else WORKERS
    service = strategies.parse(name).traits.servers
    servers = service.rule.server_groups if service else 0
    seed = seeds.pop(0)
    with TemporaryDirectory() as folder:
        command = [str(SCRIPTS / "manyhands"), "train", "--strategy", name, "--workers", str(workers)]
        command += ["--servers", str(servers), "--threads", "1", "--seed", str(seed)]
        done = subprocess.run(
            [*command, *more, "--json", "--out", "run"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"seed": seed, "accuracy": 0.0, "error": done.stderr.strip().splitlines()[-1]}
        summary = json.loads(done.stdout)
        with open(f"{folder}/run/plan.json") as file:
            optimizer = json.load(file)["train"]["optimizer"]
    return {"seed": seed, "accuracy": summary["accuracy"], "optimizer": optimizer, "summary": summary}


def run(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Findings]]:
    more = []
    if options.quick:
        options.rounds, more = 1, ["--steps", "2"]
    starts = {name: partial(train, name, list(range(options.rounds)), more) for name in options.strategies}
    raw = interleave(starts, options.rounds, "accuracy")
    found = findings(raw)
    show(found)
    return raw, {"": found}


def findings(raw: dict[str, list[dict[str, Any]]]) -> Findings:
    """By strategy, one number per seed."""
    accuracy = {name: [100 * turn["accuracy"] for turn in turns] for name, turns in raw.items()}
    return Findings(
        title=f"accuracy on the digits, {WORKERS} workers (single: one), one run per seed",
        measured=[Measured(of=name, unit="%", values={"accuracy": each}) for name, each in accuracy.items()],
        counts={
            "set-ups": len(raw),
            f"median seed at {TARGET:.0%} or more": sum(
                statistics.median(each) >= 100 * TARGET for each in accuracy.values()
            ),
            f"every seed at {TARGET:.0%} or more": sum(
                min(each) >= 100 * TARGET for each in accuracy.values()
            ),
        },
        notes=[turn["error"] for turns in raw.values() for turn in turns if "error" in turn],
    )
