"""Servers as events: each a queue on a host, reached through memory or over the link of both hosts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import simpy

from manyhands.planner.conditions import Conditions
from manyhands.planner.operations import Fresh, Pushed, Settle
from manyhands.planner.simulated_machine import Events, Machine
from manyhands.servers.protocol.service import Service

PIECES = 4
"""Of a message, each of which takes its turn where it arrives."""


class SimulatedServers:
    """All servers of a way; server i is on host i modulo hosts."""

    def __init__(
        self,
        env: simpy.Environment,
        conditions: Conditions,
        service: Service,
        machines: Sequence[Machine],
        workers: int,
    ) -> None:
        self._env, self._conditions, rule = env, conditions, service.rule
        self._rule, self._workers = rule, workers
        self._count = max(1, conditions.way.servers // conditions.way.mesh.members)
        self._machines = machines
        hosts = len(machines)
        self._processors = [simpy.Resource(env) for _ in range(self._count)]
        self._out = [simpy.Resource(env) for _ in range(hosts)]
        self._in = [simpy.Resource(env) for _ in range(hosts)]
        self._team = workers // (rule.teams * rule.server_groups) if rule.gathers else 1
        self._confirms = service.elastic and hosts > 1
        self._answers: defaultdict[int, list[simpy.Event]] = defaultdict(list)
        self._last: dict[int, list[simpy.Event]] = {}
        self._pushes: defaultdict[int, int] = defaultdict(int)
        self._steps: defaultdict[int, int] = defaultdict(int)
        self._gathered: defaultdict[Any, list[tuple[simpy.Event, int]]] = defaultdict(list)
        self._all_ended: dict[int, simpy.Event] = {}
        self._ended: defaultdict[int, int] = defaultdict(int)

    def push(self, rank: int, host: int, size_bytes: float) -> Events:
        """A worker's gradients on their way, until their answer is here."""
        answered = self._env.event()
        self._answers[rank].append(answered)
        number = self._pushes[rank]
        self._pushes[rank] += 1
        server = number % self._count
        home = server % len(self._machines)
        yield from self._send(host, home, size_bytes)
        if host != home:
            yield from self._serve(server, 2 * size_bytes * self._conditions.link.cpu_s_per_byte)
        if not self._rule.gathers:
            yield from self._serve(server, self._update_s(size_bytes))
            yield from self._answer(home, host, size_bytes, answered)
            return
        yield from self._serve(server, size_bytes * self._conditions.add_s)
        key = (rank // self._team, self._steps[rank], number)
        self._gathered[key].append((answered, host))
        if len(self._gathered[key]) == self._team:
            yield from self._serve(server, self._update_s(size_bytes))
            for other, there in self._gathered.pop(key):
                self._env.process(self._answer(home, there, size_bytes, other))

    def _update_s(self, size_bytes: float) -> float:
        return float(size_bytes * self._conditions.update_s)

    def _serve(self, server: int, seconds: float) -> Events:
        machine = self._machines[server % len(self._machines)]
        with self._processors[server].request() as turn:
            yield turn
            yield from machine.compute(self._env, seconds / self._conditions.crowding, 1.0)

    def _send(self, source: int, target: int, size_bytes: float) -> Events:
        """Message after message leaves a host; pieces of those from several hosts enter another in turn."""
        if source == target:  # through memory: the process that is told of it wakes up
            yield self._env.timeout(float(self._conditions.meeting_s))
            return
        arrivals = []
        with self._out[source].request() as turn:
            yield turn
            for _ in range(PIECES):
                yield self._env.timeout(size_bytes / PIECES * self._conditions.link.busy_s_per_byte)
                arrivals.append(self._env.process(self._enter(target, size_bytes / PIECES)))
        yield simpy.AllOf(self._env, arrivals)

    def _enter(self, target: int, size_bytes: float) -> Events:
        link = self._conditions.link
        yield self._env.timeout(link.latency_s)
        with self._in[target].request() as turn:
            yield turn
            yield self._env.timeout(size_bytes * link.busy_s_per_byte)

    def _answer(self, source: int, target: int, size_bytes: float, answered: simpy.Event) -> Events:
        if not self._rule.fetches:
            yield from self._send(source, target, size_bytes)
        answered.succeed()
        yield from ()

    def end_step(self, rank: int) -> None:
        self._last[rank] = self._answers.pop(rank, [])
        self._pushes[rank] = 0
        step = self._steps[rank]
        self._steps[rank] += 1
        self._ended[step] += 1
        event = self._all_ended.setdefault(step, self._env.event())
        if self._ended[step] == self._workers:
            event.succeed()

    def wait(self, rank: int, one: Pushed | Settle | Fresh) -> Events:
        rule = self._rule
        yield self._env.timeout(0.0)  # what was pushed just now is under way
        match one:
            case Pushed() if rule.gathers or self._confirms:
                yield simpy.AllOf(self._env, self._answers[rank])
            case Settle():
                yield simpy.AllOf(self._env, [*self._answers[rank], *self._last.get(rank, [])])
            case Fresh() if rule.bound is not None and not rule.gathers:
                yield simpy.AllOf(self._env, self._last.get(rank, []))
                behind = self._steps[rank] - 1 - rule.bound
                if behind >= 0:
                    yield self._all_ended.setdefault(behind, self._env.event())

    def until_writable(self, rank: int) -> Events:
        """Before a group's next gradient is written: its last one is applied."""
        before, number = self._last.get(rank, []), self._pushes[rank]
        if not self._rule.gathers and number < len(before):
            yield before[number]

    def pull(self, host: int, size_bytes: float) -> Events:
        each = size_bytes / self._count
        for server in range(self._count):
            home = server % len(self._machines)
            if home == host:
                yield self._env.timeout(2 * each * self._conditions.touch_s)
            else:
                yield from self._send(home, host, each)
                yield self._env.timeout(self._conditions.link.latency_s)
