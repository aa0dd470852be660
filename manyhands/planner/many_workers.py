"""Every worker's own clock, step by step, in numpy: thousands of workers whose steps take different times.

Where the closed form waits for an expected slowest worker, here workers draw their steps from those that were measured,
and wait for whom they really meet:

    all together    T_i ← max_j T_j
    a host          the same over its workers
    pairs           T_i, T_j ← max(T_i, T_j), pairs as the strategy draws them
    stale servers   T_i(k) = max(T_i(k−1), max_j T_j(k−1−s)) + X_i(k):  s steps ahead of the slowest at most
"""

from collections import deque
from typing import Any

import numpy as np

from manyhands.planner.amounts import Amount
from manyhands.planner.conditions import Conditions
from manyhands.planner.facts import Facts
from manyhands.planner.operations import Fresh, Meet, Sum, Swap
from manyhands.planner.price import Prediction, assemble, conditions_of, of_both
from manyhands.planner.walk import Spent, Walk
from manyhands.planner.ways import Way

LEAST_STEPS = 64
"""That are walked, at least one period of the strategy."""


class ManyWorkers(Walk):
    """Clocks of all workers of one or several kinds of hosts; the coefficients are those of the first kind."""

    def __init__(
        self,
        conditions: Conditions,
        relative: np.ndarray,
        hosts: np.ndarray,
        seed: int = 0,
        *,
        beside_server: bool = False,
    ) -> None:
        """`relative` is each worker's compute ÷ that of the first kind's, `hosts` the host of each."""
        super().__init__(conditions, beside_server=beside_server)
        self._relative, self._hosts = relative, hosts
        self._random = np.random.default_rng(seed)
        self._jitter = np.array(conditions.jitter or (1.0,))
        self.now = np.zeros(len(relative))
        self._ended: deque[float] = deque(maxlen=1 + (self.queue.bound or 0) if self.queue else 1)
        self._edges = np.flatnonzero(np.diff(hosts, prepend=-1))

    def step(self, operations: Any) -> None:
        super().step(operations)
        self._ended.append(float(self.now.max()))

    def _period(self) -> None:
        for operations in self.conditions.recorded.steps:
            self.step(operations)

    def _work(self, seconds: Amount) -> Amount:
        drawn = self._random.choice(self._jitter, size=len(self._relative))
        return seconds * self._relative * drawn

    def _wait(self, until: np.ndarray) -> None:
        ahead = np.maximum(until - self.now, 0.0)
        self.now = self.now + ahead
        self.spent.terms["waiting"] = self.spent.terms["waiting"] + ahead

    def _wait_for_others(self, workers: int) -> None:
        everyone = self.conditions.role.workers
        if workers >= everyone:
            self._wait(np.full_like(self.now, self.now.max()))
        elif workers == 2:
            self._wait_in_pairs()
        elif workers == self.conditions.role.neighbours:
            self._wait_on_host()
        elif workers > 1:  # teams, in the order of their ranks
            teams = self.now.reshape(-1, workers).max(axis=1)
            self._wait(np.repeat(teams, workers))

    def _wait_on_host(self) -> None:
        largest = np.maximum.reduceat(self.now, self._edges)
        self._wait(np.repeat(largest, np.diff(self._edges, append=len(self.now))))

    def _wait_in_pairs(self) -> None:
        order = self._random.permutation(len(self.now))
        ones, others = order[: len(order) // 2], order[len(order) // 2 : 2 * (len(order) // 2)]
        until = self.now.copy()
        until[ones] = until[others] = np.maximum(self.now[ones], self.now[others])
        self._wait(until)

    def _sum(self, one: Sum) -> None:
        if one.scope == "replicas":
            super()._sum(one)
            return
        self._wait_on_host()
        self._until(self.now + self.conditions.sum_s(one.sent_bytes, one.scope))

    def _swap(self, one: Swap) -> None:
        self._wait_in_pairs()
        self._until(self.now + self.conditions.swap_s(one.sent_bytes))

    def _meet(self, one: Meet) -> None:
        self._wait_on_host()
        self._spend("waiting", self.conditions.meeting_s, computes=False)

    def _fresh(self, one: Fresh) -> None:
        queue = self.queue
        if queue is None or queue.bound is None or queue.gathers:
            return
        self._until(queue.applied(self.now))
        if len(self._ended) == self._ended.maxlen:
            self._wait(np.full_like(self.now, self._ended[0]))


def price_many(facts: Facts, way: Way, steps: int = LEAST_STEPS, seed: int = 0) -> Prediction:
    """The same result as the closed form's, with every worker's own clock."""
    kinds = conditions_of(facts, way)
    relative, hosts = _workers(way, kinds)
    first = kinds[0]
    walk = ManyWorkers(first, relative, hosts, seed)
    spent, count = _spent(walk, steps)
    if walk.queue and walk.queue.is_uneven:
        beside, _ = _spent(ManyWorkers(first, relative, hosts, seed, beside_server=True), steps)
        spent = of_both(beside, spent, walk.queue.servers / first.role.hosts)
    return assemble(facts, way, [(each, spent, count) for each in kinds], level="many workers")


def _spent(walk: ManyWorkers, steps: int) -> tuple[Spent, int]:
    """The mean of all workers, from the end of the first period to that of the last."""
    length = len(walk.conditions.recorded.steps)
    periods = max(1, -(-steps // length))
    walk._period()
    walk._restart()
    began = walk.now.copy()
    for _ in range(periods):
        walk._period()
    terms = {name: float(np.mean(seconds)) for name, seconds in walk.spent.terms.items()}
    missing = float(np.mean(walk.now - began)) - sum(terms.values())
    terms["waiting"] += max(0.0, missing)
    return Spent(terms=terms, cpu_s=float(np.mean(walk.spent.cpu_s))), periods * length


def _workers(way: Way, kinds: list[Conditions]) -> tuple[np.ndarray, np.ndarray]:
    """For each replica's worker: its compute beside that of the first kind, and its host."""
    relative: list[float] = []
    hosts: list[int] = []
    first = kinds[0].passing.wall_s
    for place, host in enumerate(way.hosts):
        each = max(1, round(host.processes / way.mesh.members)) if way.mesh.members > 1 else host.processes
        for _ in range(host.count):
            number = hosts[-1] + 1 if hosts else 0
            relative += [kinds[place].passing.wall_s / first] * each
            hosts += [number] * each
    count = kinds[0].role.workers
    return np.array(relative[:count]), np.array(hosts[:count])
