"""Predictions beside runs: held-out error of step times over ways that were never run while probing.

python benchmarks/planning.py --models resnet20 mlp            (this host)
python benchmarks/planning.py --hosts 2 3 --mbit 100 1000      (as root: it emulates hosts as well)

Each model is probed once, as `manyhands probe` does it. Then every way is alive at once with a reference of one worker,
and takes turns of a few steps in rounds. What is compared is a way's step ÷ the reference's in the same round,
predicted and measured: what the machine does in a round it does to both. The ways that the probe itself runs are left
out.
"""

import argparse
import itertools
import statistics
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import planning_hosts
from common import arguments, interleave, say, show, write
from summaries import Findings, Measured

from manyhands.job.plan import Cluster, Plan, Train
from manyhands.lab.emulated_hosts import EmulatedHosts, available
from manyhands.lab.taking_turns import ContenderLost, TurnTaking, counted
from manyhands.planner.contender import Contender, Divided
from manyhands.planner.facts import ClusterFacts, Facts, HostsOfKind, LinkFacts
from manyhands.planner.jobs import of_plan
from manyhands.planner.measure import HostProbe, probe_host
from manyhands.planner.price import Prediction, price
from manyhands.planner.ways import HostSplit, Way

MODELS = {
    "mlp": ("mlp:hidden=1024-1024", "synthetic:3x32x32:10"),
    "cnn": ("cnn", "synthetic:1x28x28:10"),
    "resnet20": ("resnet20", "synthetic:3x32x32:10"),
    "vgg16": ("vgg16:head=linear", "synthetic:3x32x32:10"),
    "lstm": ("lstm", "text"),
}
HERE = (
    ("all-reduce:topology=ring", "single", 0),
    ("all-reduce:topology=tree", "single", 0),
    ("double-buffer", "single", 0),
    ("local-sgd:period=4", "single", 0),
    ("hogwild", "single", 0),
    ("gossip", "single", 0),
    ("parameter-server", "single", 1),
    ("parameter-server:consistency=async", "single", 1),
    ("all-reduce", "pipeline:stages=2,microbatches=4", 0),
    ("all-reduce", "sharded:shards=2", 0),
)
BETWEEN = (
    ("all-reduce", 0),
    ("all-reduce:topology=ring", 0),
    ("all-reduce:topology=tree", 0),
    ("local-sgd:period=4", 0),
    ("parameter-server", 1),
)
STEPS, WARM_UP = 8, 2
START_S, TURN_S = 180.0, 120.0
REFERENCE = "1 × 1"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A way, what was predicted of it, and its steps ÷ the reference's, round by round."""

    model: str
    way: str
    rate: float
    predicted: float
    low: float
    high: float
    measured: tuple[float, ...]
    samples: float

    @property
    def error(self) -> float:
        return self.predicted / statistics.median(self.measured) - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= statistics.median(self.measured) <= self.high


def main() -> None:
    parser = arguments(__doc__ or "", rounds=7)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument(
        "--hosts", nargs="*", type=int, default=[], metavar="N", help="numbers of emulated hosts"
    )
    parser.add_argument(
        "--mbit", nargs="*", type=float, default=[1000.0], help="of their links (default 1000)"
    )
    parser.add_argument("--ways", nargs="*", help="strategies on this host (default: all)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.models = 2, options.models[:1]
        options.ways = options.ways or ["double-buffer"]
    if options.hosts and (why := available()):
        raise SystemExit(why)
    found: list[HeldOut] = []
    for model in options.models:
        say(f"{model}: probing")
        probe = probe_host(of_plan(plan_of(model)), seconds=1.0 if options.quick else None)
        found += on_this_host(model, probe, options)
        for hosts, mbit in itertools.product(options.hosts, options.mbit):
            found += on_hosts(model, probe, hosts, mbit, options)
    result = findings(found)
    show(result)
    write(
        options,
        benchmark="planning",
        results=[msgspec.to_builtins(each) for each in found],
        summaries={"planning": result},
    )


def plan_of(model: str, **more: Any) -> Plan:
    name, data = MODELS[model]
    return Plan(model=name, data=data, train=Train(epochs=10**6, save_every="never"), **more)


def command_of(model: str, way: Way) -> tuple[str, ...]:
    cluster = Cluster(workers=way.workers, threads=way.hosts[0].threads, servers=way.servers)
    plan, _ = plan_of(model).on_fair_terms()
    plan = msgspec.structs.replace(plan, strategy=way.strategy, placement=way.placement, cluster=cluster)
    return ("-m", "manyhands.job.declared", plan.encode().decode())


def facts_of(probe: HostProbe, hosts: int = 1, link: LinkFacts | None = None) -> Facts:
    """Emulated hosts are one machine, and share its cores."""
    kind = HostsOfKind(host=probe.host, count=hosts, machine="this machine" if hosts > 1 else "")
    return Facts(
        model=probe.model,
        cluster=ClusterFacts(hosts=(kind,), link=link),
        batch=probe.batch,
        indistinct=probe.indistinct,
    )


def split(probe: HostProbe, count: int, processes: int) -> tuple[HostSplit, ...]:
    return (HostSplit(kind=probe.host.kind, count=count, processes=processes, threads=1),)


def on_this_host(model: str, probe: HostProbe, options: argparse.Namespace) -> list[HeldOut]:
    ways = {}
    for strategy, placement, servers in HERE:
        if not options.ways or strategy in options.ways:
            way = Way(strategy=strategy, placement=placement, servers=servers, hosts=split(probe, 1, 2))
            ways[str(way)] = way

    def start(turns: TurnTaking, name: str, way: Way, stack: ExitStack) -> None:
        divided = Divided(
            workers=way.workers,
            threads=1,
            strategy=way.strategy,
            servers=way.servers,
            command=command_of(model, way),
        )
        turns.start(name, lambda path: started(Contender(divided, path), stack))

    return compared(model, facts_of(probe), probe, ways, start, options.rounds)


def on_hosts(
    model: str, probe: HostProbe, hosts: int, mbit: float, options: argparse.Namespace
) -> list[HeldOut]:
    with EmulatedHosts(hosts, bandwidth_mbit=mbit) as net, TemporaryDirectory() as folder:
        say(f"{model}: links of {hosts} hosts at {mbit:g} Mbit/s")
        link = planning_hosts.measure_links(net, Path(folder)).link
        ways = {}
        for strategy, servers in BETWEEN:
            if not options.ways or strategy in options.ways:
                way = Way(strategy=strategy, servers=servers, hosts=split(probe, hosts, 1))
                ways[f"{way} at {mbit:g} Mbit/s"] = way
        ports = itertools.count(29500)

        def start(turns: TurnTaking, name: str, way: Way, stack: ExitStack) -> None:
            words = command_of(model, way)
            if name == REFERENCE:
                divided = Divided(workers=1, threads=1, strategy=way.strategy, command=words)
                turns.start(name, lambda path: started(Contender(divided, path), stack))
                return
            places = [*range(hosts), *([0] * way.servers)]
            port = next(ports)
            turns.start(
                name,
                lambda path: planning_hosts.ProcessesOnHosts(net, places, way.servers, port, path, words),
            )

        return compared(model, facts_of(probe, hosts, link), probe, ways, start, options.rounds)


def started(contender: Contender, stack: ExitStack) -> Contender:
    stack.callback(contender.close)
    return contender


def compared(
    model: str, facts: Facts, probe: HostProbe, ways: dict[str, Way], start: Any, rounds: int
) -> list[HeldOut]:
    """All ways and the reference in turns."""
    reference = Way(strategy="single", hosts=split(probe, 1, 1))
    alive: dict[str, int] = {}
    with ExitStack() as stack:  # contenders give their descriptors back after their turns are over
        turns = stack.enter_context(TurnTaking())
        closing = ExitStack()
        stack.callback(closing.close)
        for name, way in {REFERENCE: reference, **ways}.items():
            say(f"{model}: {name} starts")
            try:
                start(turns, name, way, closing)
                turns.meet(name, way.workers, START_S)
                turns.ask(name, {"steps": 2 * WARM_UP}, START_S)
                alive[name] = way.workers
            except ContenderLost as lost:
                if name == REFERENCE:
                    raise
                say(f"{model}: {name} is left out, {lost.reason}")

        def take(name: str) -> float:
            each = counted(turns.ask(name, {"steps": WARM_UP + STEPS}, TURN_S), WARM_UP)
            return statistics.fmean(step for one in each for step in one["step_s"])

        seconds = interleave({name: lambda name=name: take(name) for name in alive}, rounds, model)
    base = price(facts, reference, draws=True)
    found = []
    for name, way in ways.items():
        if name in seconds:
            with suppress(ZeroDivisionError):
                found.append(
                    held_out(
                        model, name, price(facts, way, draws=True), base, seconds[name], seconds[REFERENCE]
                    )
                )
    return found


def held_out(
    model: str,
    name: str,
    predicted: Prediction,
    base: Prediction,
    steps: list[float],
    of_reference: list[float],
) -> HeldOut:
    """Draws of both belong together: what both depend on is drawn for both alike."""
    draws = np.atleast_1d(np.asarray(predicted.step_s) / np.asarray(base.step_s))
    low, middle, high = np.quantile(draws, [0.05, 0.5, 0.95])
    wider = 1 + predicted.spread
    return HeldOut(
        model=model,
        way=name,
        rate=predicted.rate,
        predicted=float(middle),
        low=float(low) / wider,
        high=float(high) * wider,
        measured=tuple(one / other for one, other in zip(steps, of_reference, strict=True)),
        samples=predicted.samples,
    )


def findings(found: list[HeldOut]) -> Findings:
    errors = [abs(each.error) for each in found]
    counts: dict[str, Any] = {"configurations": len(found)}
    if errors:
        counts |= {
            "error, median": round(statistics.median(errors), 4),
            "error, nine of ten below": round(float(np.quantile(errors, 0.9)), 4),
            "error, worst": round(max(errors), 4),
            "inside the 90 % interval": round(sum(each.is_inside for each in found) / len(found), 3),
        }
    orders = [
        tau
        for model in {each.model for each in found}
        if (tau := kendall([e for e in found if e.model == model]))
    ]
    if orders:
        counts["Kendall's tau of samples per second, median over models"] = round(
            statistics.median(orders), 3
        )
    return Findings(
        title="predicted ÷ measured step, both as ratios to one worker in the same rounds",
        measured=[
            Measured(
                of=model,
                unit="predicted ÷ measured",
                values={
                    each.way: [each.predicted / ratio for ratio in each.measured]
                    for each in found
                    if each.model == model
                },
            )
            for model in dict.fromkeys(each.model for each in found)
        ],
        counts=counts,
    )


def kendall(found: list[HeldOut]) -> float | None:
    """How far the order by predicted samples per second is that by measured ones: 1 the same, −1 the reverse."""
    rates = [
        (each.samples / each.predicted, each.samples / statistics.median(each.measured)) for each in found
    ]
    pairs = list(itertools.combinations(rates, 2))
    return statistics.fmean(float(np.sign((a - c) * (b - d))) for (a, b), (c, d) in pairs) if pairs else None


if __name__ == "__main__":
    main()
