"""How much of a sum late gradients hide: steps on emulated hosts whose compute is longer than what the link needs.

Links and pace are those of `traffic`. A step without any exchange is what is left when all of it is hidden.
"""

import argparse
from functools import partial
from typing import Any

from common import interleave, show
from section_traffic import HOSTS, step_s, turn
from summaries import Findings, Measured, ratio

from manyhands.lab.emulated_hosts import available

AT_ONCE, LATE, NONE = "ring", "double-buffer", "no exchange"
HIDDEN = 1.05  # a late step ÷ one without an exchange


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=int, default=24_000_000, help="of the model (default 24000000)")
    parser.add_argument("--step-s", type=float, default=0.5, help="paced compute of a step (default 0.5)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per turn (default 12)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Findings]]:
    if why := available():
        raise SystemExit(why)
    if options.quick:
        options.rounds, options.steps, options.bytes, options.step_s = 1, 4, 2_000_000, 0.02
    ways = {AT_ONCE: "ring", LATE: "double-buffer", NONE: f"local-sgd:period={1000 * options.steps}"}
    starts = {name: partial(turn, way, list(range(HOSTS)), [], options) for name, way in ways.items()}
    raw = interleave(starts, options.rounds, "hiding")
    seconds = {name: [step_s(each) for each in turns] for name, turns in raw.items()}
    found = findings(seconds, options.bytes, options.step_s)
    show(found)
    return {"step_s": seconds, "ratios": [line.record() for line in found.ratios]}, {"": found}


def findings(seconds: dict[str, list[float]], size_bytes: int, pace_s: float) -> Findings:
    title = f"a step on {HOSTS} emulated hosts, {size_bytes / 1e6:g} MB, compute paced at {pace_s:g} s"
    return Findings(
        title=title,
        measured=[Measured(of=title, unit="s", values=seconds)],
        ratios=[
            ratio(f"{LATE} ÷ {NONE}", seconds[LATE], seconds[NONE], HIDDEN, at_most=True),
            ratio(f"{AT_ONCE} ÷ {NONE}", seconds[AT_ONCE], seconds[NONE]),
        ],
    )
