"""What more hosts are worth: the curve of every strategy, where half is wasted, what is cheapest, failures included.

efficiency   rate(n) ÷ (n · rate(1)); half is wasted where it falls below 1/2
goodput      rate · 1 / (1 + λ · (recovery + half a step)),  λ losses of any host per second
cost         hours of the run · cost per hour of the hosts that it uses
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.planner.candidates import WayLimits, host_sizes, ways
from manyhands.planner.conditions import kind_of
from manyhands.planner.facts import Facts
from manyhands.planner.memory_need import misfit
from manyhands.planner.price import Prediction, price
from manyhands.planner.ways import Way

WASTED = 0.5


@dataclass(frozen=True, kw_only=True)
class Point:
    """A number of hosts, and the best way to use them with a strategy."""

    hosts: int
    prediction: Prediction
    goodput: float
    """Samples per second with what failures cost."""
    cost_per_hour: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One strategy over numbers of hosts."""

    strategy: str
    points: tuple[Point, ...]

    def efficiency(self, point: Point) -> float:
        """Of what its first point makes per host."""
        first = self.points[0]
        return (point.prediction.rate / point.hosts) / (first.prediction.rate / first.hosts)

    @property
    def half_wasted_at(self) -> int | None:
        """The first number of hosts that makes less than half of what they could."""
        return next((point.hosts for point in self.points if self.efficiency(point) < WASTED), None)

    @property
    def best(self) -> Point:
        return max(self.points, key=lambda point: point.goodput)


def curves(facts: Facts, wanted: WayLimits, strategies: Sequence[str]) -> list[Curve]:
    """Of each strategy, with the best split and servers for every number of hosts."""
    found = []
    for strategy in strategies:
        points = [
            point
            for size in host_sizes(facts.cluster.size)
            if (point := _point(facts, wanted, strategy, size))
        ]
        if points:
            found.append(Curve(strategy=strategy, points=tuple(points)))
    return sorted(found, key=lambda curve: -curve.best.goodput)


def _point(facts: Facts, wanted: WayLimits, strategy: str, hosts: int) -> Point | None:
    options = [price(facts, way) for way in ways(facts, replace(wanted, strategy=strategy, hosts=hosts))]
    fitting = [each for each in options if not misfit(facts, each.way, each.memory_bytes)]
    if not fitting:
        return None
    best = price(facts, max(fitting, key=lambda each: each.rate).way, draws=True)
    return Point(
        hosts=hosts,
        prediction=best,
        goodput=goodput(facts, best),
        cost_per_hour=cost_per_hour(facts, best.way),
    )


def goodput(facts: Facts, each: Prediction) -> float:
    """Samples per second of a run in which hosts are lost: each loss costs the recovery and half a step."""
    losses_per_s = sum(
        host.count * kind_of(facts.cluster, host.kind).failures_per_hour / 3600 for host in each.way.hosts
    )
    return each.rate / (1 + losses_per_s * (facts.cluster.recovery_s + each.seconds / 2))


def cost_per_hour(facts: Facts, way: Way) -> float:
    return sum(host.count * kind_of(facts.cluster, host.kind).cost_per_hour for host in way.hosts)


@dataclass(frozen=True, kw_only=True)
class Cheapest:
    """What costs least in the time allowed."""

    point: Point
    seconds: float
    cost: float


def cheapest(facts: Facts, found: Sequence[Curve], epochs: float, within_s: float) -> Cheapest | None:
    """Among ways whose steps equal those of one process; None: no number of these hosts is fast enough."""
    samples = facts.model.samples_per_epoch * epochs
    options = []
    for curve in found:
        for point in curve.points:
            seconds = samples / point.goodput
            if point.prediction.way.trains_alike and seconds <= within_s:
                cost = seconds / 3600 * point.cost_per_hour
                options.append(Cheapest(point=point, seconds=seconds, cost=cost))
    return min(options, key=lambda each: (each.cost, each.seconds), default=None)
