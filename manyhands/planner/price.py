"""What a way costs: one result, whichever of the three levels has found it.

    closed form     `walk.py`: one worker stands for all; vectorised over draws
    many workers    `many_workers.py`: every worker's clock, step by step, in numpy: thousands of workers
    simulation      `simulation.py`: every message and server as an event: up to 64 workers

On top of what one worker meets there are floors: a step takes at least what all of it asks of a machine's cores ÷ what
they give. Workers of several kinds who step together take as long as the slowest; those who do not add up.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.planner.amounts import Amount, later, typical
from manyhands.planner.conditions import Conditions, Pick, best, conditions, drawn, kind_of
from manyhands.planner.facts import Facts
from manyhands.planner.memory_need import memory_bytes
from manyhands.planner.walk import Spent, Walk
from manyhands.planner.ways import Way

PERIODS = 1
"""That are counted, after one that is not."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a way on given hosts."""

    way: Way
    samples: float
    """That all workers together make in a step."""
    step_s: Amount
    """Wall seconds of a step, averaged over whole periods: a number, or one for each draw."""
    terms: dict[str, float]
    """Seconds of a step by what they go into; they add up to the step."""
    memory_bytes: dict[str, float]
    """Per host, by kind."""
    level: str = "closed form"
    spread: float = 0.0
    """By how much it may be wrong beyond its draws, in one case of ten."""

    @property
    def seconds(self) -> float:
        return typical(self.step_s)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    def interval(self, inside: float = 0.9) -> tuple[float, float]:
        """Samples per second between which the run's should be, in this share of all cases."""
        draws = np.atleast_1d(np.asarray(self.step_s, dtype=float))
        low, high = np.quantile(draws, [(1 - inside) / 2, (1 + inside) / 2])
        middle = self.seconds
        # Two independent reasons to be wrong: their logarithms add up as squares do.
        slower = math.hypot(math.log(max(high / middle, 1.0)), math.log1p(self.spread))
        faster = math.hypot(math.log(max(middle / low, 1.0)), math.log1p(self.spread))
        return self.rate * math.exp(-slower), self.rate * math.exp(faster)


def price(facts: Facts, way: Way, *, draws: bool = False) -> Prediction:
    """The closed form: with its best values alone, or over all draws."""
    return assemble(
        facts, way, [_walked(each) for each in conditions_of(facts, way, drawn if draws else best)]
    )


def conditions_of(facts: Facts, way: Way, pick: Pick = best) -> list[Conditions]:
    """For each kind of host of the way."""
    return [conditions(facts, way, host, pick) for host in way.hosts]


def _walked(found: Conditions) -> tuple[Conditions, Spent, float]:
    """What a worker of this kind spends in so many steps."""
    walk = Walk(found)
    walk.run(PERIODS)
    count = PERIODS * len(found.recorded.steps)
    queue = walk.queue
    if queue is None or not queue.is_uneven:
        return found, walk.spent, count
    beside = Walk(found, beside_server=True)
    beside.run(PERIODS)
    return found, of_both(beside.spent, walk.spent, queue.servers / found.role.hosts), count


def of_both(ones: Spent, others: Spent, share: float) -> Spent:
    """The mean step of two classes of workers who do not wait for each other: their paces add up."""
    first, second = share / ones.total_s, (1 - share) / others.total_s
    step_s = 1.0 / (first + second)
    terms = {name: step_s * (first * ones.terms[name] + second * others.terms[name]) for name in ones.terms}
    return Spent(terms=terms, cpu_s=step_s * (first * ones.cpu_s + second * others.cpu_s))


def assemble(
    facts: Facts, way: Way, kinds: list[tuple[Conditions, Spent, float]], level: str = "closed form"
) -> Prediction:
    """One result of what the workers of each kind of host spend in so many steps."""
    steps, terms = [], []
    floor = _cores_floor(facts, way, kinds)
    for _, spent, count in kinds:
        own = {name: seconds / count for name, seconds in spent.terms.items()}
        total = spent.total_s / count
        missing = later(floor - total, 0.0)
        own["waiting"] = own["waiting"] + missing
        steps.append(total + missing)
        terms.append(own)
    feeds = way.mesh.feeds * facts.batch
    if way.traits.lockstep or len(steps) == 1:
        slowest = max(range(len(steps)), key=lambda index: typical(steps[index]))
        step_s = steps[slowest]
    else:
        # Each kind at its own pace: the samples of all in a second.
        rates = [
            host.count * host.processes / way.workers / step
            for host, step in zip(way.hosts, steps, strict=True)
        ]
        step_s, slowest = 1.0 / sum(rates), 0
        terms[0] = _blended(terms, typical(step_s))
    return Prediction(
        way=way,
        samples=feeds,
        step_s=step_s,
        terms={name: typical(seconds) for name, seconds in terms[slowest].items()},
        memory_bytes=memory_bytes(facts, way, [found.recorded.kept_bytes for found, _, _ in kinds]),
        level=level,
        spread=spread_of(facts, way),
    )


def _blended(terms: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """The shares of all kinds, of a step that is as long as their common pace makes it."""
    total = {name: sum(typical(each[name]) for each in terms) for name in terms[0]}
    whole = sum(total.values()) or 1.0
    return {name: seconds / whole * step_s for name, seconds in total.items()}


def _cores_floor(facts: Facts, way: Way, kinds: list[tuple[Conditions, Spent, float]]) -> Amount:
    """What a step asks of the cores of the busiest machine ÷ how many it has."""
    wanted: dict[str, Amount] = {}
    cores: dict[str, float] = {}
    for place, (host, (found, spent, count)) in enumerate(zip(way.hosts, kinds, strict=True)):
        kind = kind_of(facts.cluster, host.kind)
        name = kind.machine or host.kind
        hosts = host.count if kind.machine else 1
        busy = spent.cpu_s / count / found.crowding * min(host.threads, kind.host.cores / host.processes)
        demand = busy * host.processes * hosts
        if place == 0 and way.servers:
            demand = demand + _servers_cpu_s(found)
        wanted[name] = wanted.get(name, 0.0) + demand
        cores[name] = kind.host.cores
    floor: Amount = 0.0
    for name, demand in wanted.items():
        floor = later(floor, demand / cores[name])
    return floor


def _servers_cpu_s(found: Conditions) -> Amount:
    """Of all servers in a step of all workers."""
    queue = Walk(found).queue
    return queue.cpu_s(found.spans.bytes) * queue.servers if queue else 0.0


def spread_of(facts: Facts, way: Way) -> float:
    """Beyond the draws: hosts that were never measured, and the record of past predictions."""
    hosts = [kind_of(facts.cluster, each.kind).host.spread for each in way.hosts]
    return math.hypot(max(hosts), facts.past_error)
