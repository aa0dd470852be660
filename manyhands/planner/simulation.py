"""Every worker, server, link and core as events (simpy): servers beside workers, unequal hosts, up to 64 workers.

Written apart from the closed form, and held against it. A worker runs through its recorded operations; a sum begins
when all are there and goes over the link one after the other; a push goes out of its host, waits for its server, and
its answer comes back. Threads that are ready on a machine share its cores equally.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import simpy

from manyhands.planner.conditions import Conditions, kind_of
from manyhands.planner.facts import Facts
from manyhands.planner.operations import (
    Average,
    Await,
    Fresh,
    Meet,
    Operation,
    Pass,
    PullAll,
    Pushed,
    PushSpan,
    Settle,
    Start,
    Sum,
    Swap,
    Touch,
    Update,
)
from manyhands.planner.price import Prediction, assemble, conditions_of, price
from manyhands.planner.simulated_machine import Events, Machine
from manyhands.planner.simulated_servers import SimulatedServers
from manyhands.planner.walk import LEAST_NUMBERS, Spent
from manyhands.planner.ways import Way
from manyhands.strategies.partners import partner

MOST_WORKERS = 64
SLICES = 24
"""Of a pass, after each of which a worker looks how many others are ready on its machine."""


class Arrivals:
    """Events that happen when so many workers have come."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._events: dict[Any, simpy.Event] = {}
        self._come: defaultdict[Any, int] = defaultdict(int)

    def arrive(self, key: Any, count: int) -> simpy.Event:
        event = self._events.setdefault(key, self._env.event())
        self._come[key] += 1
        if self._come[key] == count:
            event.succeed()
        return event


class Simulation:
    """A way on its hosts, for so many steps of every worker."""

    def __init__(self, facts: Facts, way: Way, kinds: list[Conditions], seed: int) -> None:
        self.env = simpy.Environment()
        self.way, self.conditions = way, kinds[0]
        self.arrivals = Arrivals(self.env)
        self.link = simpy.Resource(self.env)
        self.workers: list[SimulatedWorker] = []
        machines: dict[str, Machine] = {}
        random = np.random.default_rng(seed)
        host = 0
        for place, split in enumerate(way.hosts):
            kind = kind_of(facts.cluster, split.kind)
            for _ in range(split.count):
                machine = machines.setdefault(kind.machine or f"host {host}", Machine(kind.host.cores))
                for _ in range(self._replicas(split.processes)):
                    rank = len(self.workers)
                    self.workers.append(SimulatedWorker(self, kinds[place], rank, host, machine, random))
                host += 1
        del self.workers[kinds[0].role.workers :]
        on_host = [[one for one in self.workers if one.host == number] for number in range(host)]
        self.on_host = [each for each in on_host if each]
        self.servers = None
        if kinds[0].service:
            machine_of = [each[0].machine for each in self.on_host]
            self.servers = SimulatedServers(
                self.env, kinds[0], kinds[0].service, machine_of, len(self.workers)
            )

    def _replicas(self, processes: int) -> int:
        return max(1, processes // self.way.mesh.members)

    def run(self, periods: int) -> None:
        for worker in self.workers:
            self.env.process(worker.run(periods))
        self.env.run()


class SimulatedWorker:
    """A worker on its way through the recorded operations."""

    def __init__(
        self,
        simulation: Simulation,
        conditions: Conditions,
        rank: int,
        host: int,
        machine: Machine,
        random: np.random.Generator,
    ) -> None:
        self.simulation, self.conditions = simulation, conditions
        self.rank, self.host, self.machine = rank, host, machine
        self.env = simulation.env
        self.began = self.ended = self.computed = 0.0
        self._random, self._jitter = random, conditions.jitter or (1.0,)
        self._done: dict[int, simpy.Event] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)

    def run(self, periods: int) -> Events:
        """So many periods after one that is not counted."""
        for period in range(periods + 1):
            if period == 1:
                self.began, self.computed = self.env.now, 0.0
            for operations in self.conditions.recorded.steps:
                yield from self._compute(self.conditions.session_s)
                for operation in operations:
                    yield from self._do(operation)
                if self.simulation.servers:
                    self.simulation.servers.end_step(self.rank)
        self.ended = self.env.now

    def _do(self, one: Operation) -> Events:
        conditions, servers = self.conditions, self.simulation.servers
        match one:
            case Pass():
                yield from self._pass(one)
            case Touch():
                yield from self._compute(one.touched_bytes * conditions.touch_s)
            case Update():
                yield from self._compute(one.updated_bytes * conditions.update_s)
            case Average():
                yield from self._compute(2 * one.vector_bytes * conditions.touch_s)
            case Meet():
                yield self._meet("host")
                yield self.env.timeout(conditions.meeting_s)
            case Sum():
                yield from self._sum(one)
            case Swap():
                yield from self._swap(one)
            case Start():
                self._start(one)
            case Await():
                if one.number in self._done and not one.seen:
                    yield self._done.pop(one.number)
            case PushSpan() if servers:
                self.env.process(servers.push(self.rank, self.host, one.sent_bytes))
            case Pushed() | Settle() | Fresh() if servers:
                yield from servers.wait(self.rank, one)
            case PullAll() if servers:
                yield from servers.pull(self.host, one.received_bytes)

    def _compute(self, seconds: float, slices: int = 1) -> Events:
        alone = float(seconds) / self.conditions.crowding
        self.computed += alone
        yield from self.machine.compute(self.env, alone, self.conditions.threads, slices)

    def _pass(self, one: Pass) -> Events:
        conditions, cost = self.conditions, self.conditions.passing
        sent = sum(each.sent_bytes for _, each in one.inside if isinstance(each, Start))
        length = cost.compute_s * one.share * float(self._random.choice(self._jitter))
        if one.share == 1.0:
            length += conditions.shared_add_s + conditions.sent_cpu_s(sent)
        rest = (cost.exchange_s + cost.waiting_s) * one.share
        at = 0.0
        for ready, each in (*one.inside, (1.0, None)):
            piece = (ready - at) * length
            yield from self._compute(piece, max(1, round((ready - at) * SLICES)))
            yield self.env.timeout((ready - at) * rest)
            at = ready
            if isinstance(each, Start):
                self._start(each)
            elif each is not None and self.simulation.servers:
                servers = self.simulation.servers
                yield from servers.until_writable(self.rank)
                self.env.process(servers.push(self.rank, self.host, each.sent_bytes))

    def _number(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _meet(self, scope: str) -> simpy.Event:
        number = self._number(scope)
        if scope == "replicas":
            return self.simulation.arrivals.arrive((scope, number), len(self.simulation.workers))
        count = len(self.simulation.on_host[self.host])
        return self.simulation.arrivals.arrive((scope, self.host, number), count)

    def _sum(self, one: Sum) -> Events:
        conditions = self.conditions
        yield self._meet("replicas" if one.scope == "replicas" else "host")
        if one.sent_bytes < LEAST_NUMBERS:
            yield self.env.timeout(conditions.round_trip_s)
        else:
            yield self.env.timeout(conditions.sum_s(one.sent_bytes, one.scope))

    def _swap(self, one: Swap) -> Events:
        number, size = self._number("swap"), len(self.simulation.workers)
        peer = partner(self.rank, size, number)
        if peer != self.rank:
            pair = (min(peer, self.rank), max(peer, self.rank))
            yield self.simulation.arrivals.arrive(("swap", number, pair), 2)
        tiny = one.sent_bytes < LEAST_NUMBERS
        yield self.env.timeout(
            self.conditions.round_trip_s if tiny else self.conditions.swap_s(one.sent_bytes)
        )

    def _start(self, one: Start) -> None:
        done = self._done[one.number] = self.env.event()
        if one.is_swap:
            self.env.process(self._alone(one, done))
        else:
            self.env.process(self._background(one, done, self._number("start")))

    def _alone(self, one: Start, done: simpy.Event) -> Events:
        yield self.env.timeout(self.conditions.swap_s(one.sent_bytes))
        done.succeed()

    def _background(self, one: Start, done: simpy.Event, number: int) -> Events:
        """When all have come the sum takes its turn on the link; one worker stands for all of them there."""
        simulation, conditions = self.simulation, self.conditions
        count = len(simulation.workers)
        yield simulation.arrivals.arrive(("start", number), count)
        whole = conditions.sum_s(one.sent_bytes)
        busy = conditions.link_s(one.sent_bytes) if conditions.role.hosts > 1 else whole
        if self.rank == 0:
            with simulation.link.request() as turn:
                yield turn
                yield self.env.timeout(busy)
        yield simulation.arrivals.arrive(("through", number), count)
        yield self.env.timeout(max(0.0, whole - busy))
        done.succeed()


def price_events(facts: Facts, way: Way, steps: int = 24, seed: int = 0) -> Prediction:
    """The same result as the closed form's, from every event."""
    kinds = conditions_of(facts, way)
    simulation = Simulation(facts, way, kinds, seed)
    periods = max(1, -(-steps // len(kinds[0].recorded.steps)))
    simulation.run(periods)
    count = periods * len(kinds[0].recorded.steps)
    took = [worker.ended - worker.began for worker in simulation.workers]
    # Workers who do not wait for each other make more steps in the time of the slowest: their mean pace counts.
    mean = max(took) if way.traits.lockstep else len(took) / sum(1 / each for each in took)
    computed = sum(worker.computed for worker in simulation.workers) / len(took)
    spent = Spent()
    spent.terms["compute"] = min(computed, mean)
    spent.terms["waiting"] = mean - spent.terms["compute"]
    spent.cpu_s = 0.0
    return assemble(facts, way, [(each, spent, count) for each in kinds], level="simulation")


def by_events(facts: Facts, found: Prediction, steps: int = 12) -> Prediction:
    """The same with its draws moved to where the simulation sees the best values; what has no events is as it was."""
    way = found.way
    if way.traits.servers is None or way.workers > MOST_WORKERS:
        return found
    seen, closed = price_events(facts, way, steps), price(facts, way)
    ratio = seen.seconds / closed.seconds
    more = found.seconds * (ratio - 1)
    terms = dict(found.terms)
    # What the closed form does not see is waiting for servers and their links; what it sees too much of as well.
    terms["exchange"] = max(0.0, terms["exchange"] + more)
    terms["waiting"] = max(0.0, found.seconds * ratio - sum(terms.values()) + terms["waiting"])
    return replace(found, step_s=found.step_s * ratio, terms=terms, level="simulation")
