"""Bytes per host and step on emulated hosts, beside their formulas; ring's time; images per second over workers.

Bytes are those that the kernel counted on each host's only interface, headers and acknowledgements included: nothing is
subtracted. Links carry 1 Gbit/s in each direction (`tc tbf`). Compute is paced: a third of the stated time in the
forward pass, the rest in the backward pass, evenly over 8 layers.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common import interleave, say, show
from paced import FORWARD, LAYERS
from processes import run_on_hosts
from summaries import Findings, Measured, Ratio, ratio

from manyhands import strategies
from manyhands.cluster.launchers import local
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.errors import UsageError
from manyhands.lab.emulated_hosts import BUCKET_S, EmulatedHosts, available

HOSTS = 4
LINK_MBIT = 1000.0
LINK_BYTES_S = LINK_MBIT * 1e6 / 8
WITHIN = 0.05
OF_THE_LIMIT = 1.1
BATCH = 32  # images that a paced step stands for
MOST_WORKERS = 6
LEVELS_OFF, GROWS = 1.2, 1.5  # images/s of twice the workers ÷ images/s

Turn = list[dict[str, Any]]
Formula = Callable[[int], float]  # of a host: what it sends in a step, in sizes of the model


def _ring(host: int) -> float:
    return 2 * (HOSTS - 1) / HOSTS


def _tree(host: int) -> float:
    """As many whole models as the host has transfers in the schedule; 2(N−1) over all hosts."""
    schedule = TOPOLOGIES["tree"](HOSTS, None)
    return sum(transfer.source == host for moves in schedule.rounds for transfer in moves)


def _one_server(host: int) -> float:
    """The server's host sends parameters to all others, which send it their gradients; its own worker is near."""
    return HOSTS - 1 if host == 0 else 1


def _server_each(host: int) -> float:
    """Gradients for all servers but the own, and own parameters for all workers but the own: as much as a ring."""
    return 2 * (HOSTS - 1) / HOSTS


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy on hosts: where its workers and servers are, and what its formula says."""

    strategy: str
    formula: Formula
    says: str
    workers: list[int] = field(default_factory=lambda: list(range(HOSTS)))
    servers: list[int] = field(default_factory=list)


PERIOD = 4
CASES = {
    "ring": Case(strategy="ring", formula=_ring, says="2(N−1)/N"),
    "native": Case(strategy="all-reduce", formula=_ring, says="2(N−1)/N"),
    "tree": Case(strategy="tree", formula=_tree, says="transfers of the schedule"),
    "one-server": Case(
        strategy="parameter-server", servers=[0], formula=_one_server, says="N−1 at the server, else 1"
    ),
    "four-servers": Case(
        strategy="parameter-server", servers=list(range(HOSTS)), formula=_server_each, says="2(N−1)/N"
    ),
    "cache": Case(
        strategy="parameter-server:cache=true",
        workers=[host for host in range(HOSTS) for _ in range(2)],
        servers=[0],
        formula=_one_server,
        says="as one server, whatever the workers per host (here 2)",
    ),
    "local-sgd": Case(
        strategy=f"local-sgd:period={PERIOD}",
        formula=lambda host: _ring(host) / PERIOD,
        says=f"2(N−1)/N ÷ {PERIOD}",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument("--bytes", type=int, default=24_000_000, help="of the model (default 24000000)")
    parser.add_argument("--step-s", type=float, default=0.1, help="paced compute of a step (default 0.1)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per turn (default 12)")
    parser.add_argument(
        "--growth",
        nargs="*",
        type=int,
        default=list(range(1, MOST_WORKERS + 1)),
        metavar="N",
        help="default 1 to 6",
    )


def known(cases: list[str]) -> list[str]:
    """Those whose strategy is there."""
    found = []
    for name in cases:
        try:
            strategies.parse(CASES[name].strategy)
        except UsageError as error:
            say(f"{name} is left out: {error}")
        else:
            found.append(name)
    return found


def turn(strategy: str, workers: list[int], servers: list[int], options: argparse.Namespace) -> Turn:
    settings = ["--bytes", str(options.bytes), "--step-s", str(options.step_s), "--steps", str(options.steps)]
    with EmulatedHosts(1 + max(workers + servers), bandwidth_mbit=LINK_MBIT) as net:
        environ = {local.STRATEGY: strategy}
        return run_on_hosts(net, workers, "paced_worker.py", settings, environ, servers=servers)


def bytes_of(case: Case, turns: list[Turn], options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each host: what it sent in a step as counted, what the formula says, and whether they agree."""
    found = []
    for host in range(HOSTS):
        rank = case.workers.index(host)  # the workers of a host read the same counters
        sent = [each[rank]["sent_bytes"] / options.steps for each in turns]
        wanted = case.formula(host) * options.bytes
        off = statistics.median(sent) / wanted - 1
        found.append(
            {
                "host": host,
                "sent_bytes": sent,
                "formula_bytes": wanted,
                "off": off,
                "reached": abs(off) <= WITHIN,
            }
        )
    return found


def step_s(each: Turn) -> float:
    return max(statistics.median(worker["step_s"]) for worker in each)


def limit_s(options: argparse.Namespace) -> float:
    """No gradient leaves before the forward pass and the last layer's backward pass are over; meanwhile the link earns
    what it may send at once."""
    before = options.step_s * (FORWARD + (1 - FORWARD) / LAYERS)
    return max(before + _ring(0) * options.bytes / LINK_BYTES_S - BUCKET_S, options.step_s)


def images_per_second(each: Turn) -> float:
    return BATCH * len(each) / step_s(each)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Findings]]:
    if why := available():
        raise SystemExit(why)
    if options.quick:
        options.rounds, options.steps, options.bytes, options.step_s = 1, 4, 2_000_000, 0.0
        options.growth = []
    results: dict[str, Any] = {}
    cases = {name: CASES[name] for name in known(options.cases)}
    starts = {
        name: partial(turn, case.strategy, case.workers, case.servers, options)
        for name, case in cases.items()
    }
    raw = interleave(starts, options.rounds, "traffic")
    for name, case in cases.items():
        hosts = bytes_of(case, raw[name], options)
        results[name] = {"formula": case.says, "hosts": hosts, "step_s": [step_s(each) for each in raw[name]]}
    images = grown(options) if options.growth else {}
    found = findings(results, images, limit_s(options), options.bytes)
    show(found)
    results |= {"images_per_second": images, "ratios": [line.record() for line in found.ratios]}
    return results, {"": found}


def findings(
    cases: dict[str, Any], images: dict[str, dict[str, list[float]]], limit: float, size_bytes: int
) -> Findings:
    """`cases` has what each host sent, and how long a step took."""
    measured, ratios = [], []
    for name, case in cases.items():
        sent = {
            f"host {one['host']}": [each / size_bytes for each in one["sent_bytes"]] for one in case["hosts"]
        }
        measured.append(Measured(of=name, unit="models sent in a step", values=sent))
        worst = max(case["hosts"], key=lambda one: abs(one["off"]))
        wanted = [float(worst["formula_bytes"])] * len(worst["sent_bytes"])
        says = f"sent ÷ formula ({case['formula']}), host farthest off"
        ratios.append(ratio(says, worst["sent_bytes"], wanted, of=name))
    steps = {name: case["step_s"] for name, case in cases.items()}
    measured.append(Measured(of="a step", unit="s", values=steps))
    if "ring" in cases:
        says = f"step ÷ the link's limit of {limit:.3f} s"
        ratios.append(
            ratio(says, steps["ring"], [limit] * len(steps["ring"]), OF_THE_LIMIT, at_most=True, of="ring")
        )
    for count in images.get("ring", {}):
        values = {name: each[count] for name, each in images.items()}
        measured.append(Measured(of=f"{count} workers", unit="images/s", values=values))
    title = f"{HOSTS} emulated hosts, links of {LINK_MBIT:g} Mbit/s, a model of {size_bytes / 1e6:g} MB"
    return Findings(title=title, measured=measured, ratios=[*ratios, *growth_ratios(images)])


def grown(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Images per second with each number of workers, every worker and the server on a host of its own."""
    found: dict[str, dict[str, list[float]]] = {"ring": {}, "one server": {}}
    for count in options.growth:
        workers = list(range(count))
        raw = interleave(
            {
                "ring": partial(turn, "ring", workers, [], options),
                "one server": partial(turn, "parameter-server", workers, [count], options),
            },
            options.rounds,
            f"{count} workers",
        )
        for name, turns in raw.items():
            found[name][str(count)] = [images_per_second(each) for each in turns]
    return found


def growth_ratios(images: dict[str, dict[str, list[float]]]) -> list[Ratio]:
    half, full = str(MOST_WORKERS // 2), str(MOST_WORKERS)
    if not {half, full} <= images.get("ring", {}).keys():
        return []
    ring, server = images["ring"], images["one server"]
    return [
        ratio(f"ring, {full} ÷ {half} workers", ring[full], ring[half], GROWS),
        ratio(f"one server, {full} ÷ {half} workers", server[full], server[half], LEVELS_OFF, at_most=True),
    ]
