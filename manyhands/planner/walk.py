"""Time passes over the operations of a recorded step: on one worker that stands for all, in closed form.

    overlap     a sum leaves when its span is ready and the link is free:  start_k = max(r_k, end_{k−1})
    waiting     n workers who meet after h steps wait for the slowest:  work · (E[max of n] − 1), `stragglers.py`
    sums        Σ over the schedule's rounds, `collective_cost.py`
    servers     `server_queue.py`

Times are numbers, or vectors of draws: the same code for both. `many_workers.py` does the same with every worker's own
clock, and `simulation.py` with every message.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.planner.amounts import Amount, later
from manyhands.planner.conditions import Conditions
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
from manyhands.planner.server_queue import ServerQueue
from manyhands.planner.stragglers import slowest

TERMS = ("compute", "exchange", "waiting", "update", "session")
"""What a step is made of; an exchange is what of it no computation hides."""

LEAST_NUMBERS = 256
"""Bytes: sums of fewer are numbers, which overtake what is under way."""


@dataclass
class Spent:
    """Seconds by term, and of the processor."""

    terms: dict[str, Amount] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    cpu_s: Amount = 0.0

    @property
    def total_s(self) -> Amount:
        return sum(self.terms.values())


class Walk:
    """One worker's clock over its operations."""

    def __init__(self, conditions: Conditions, *, beside_server: bool = False) -> None:
        self.conditions = conditions
        self.now: Amount = 0.0
        self.spent = Spent()
        self.since_meeting: Amount = 0.0
        self.steps_since = 0
        self.link_free: Amount = 0.0
        self._done: dict[int, Amount] = {}
        jitter = conditions.jitter
        self.average = sum(jitter) / len(jitter) if jitter else 1.0
        service = conditions.service
        self.queue = ServerQueue(conditions, service, beside_server=beside_server) if service else None
        self._do: dict[type, Callable[[Any], None]] = {
            Pass: self._pass,
            Start: lambda one: self._start(one, self.now),
            Await: self._await,
            Sum: self._sum,
            Swap: self._swap,
            Average: lambda one: self._spend("exchange", 2 * one.vector_bytes * self.conditions.touch_s),
            PushSpan: self._push,
            Pushed: self._pushed,
            Settle: self._settle,
            Fresh: self._fresh,
            PullAll: self._pull,
            Touch: lambda one: self._spend("update", one.touched_bytes * self.conditions.touch_s),
            Update: lambda one: self._spend("update", one.updated_bytes * self.conditions.update_s),
            Meet: self._meet,
        }

    def run(self, periods: int) -> None:
        """So many periods after one that is not counted: by then what goes on in the background is under way."""
        self._period()
        self._restart()
        for _ in range(periods):
            self._period()

    def _period(self) -> None:
        for operations, count in self.conditions.recorded.runs:
            if count > 2 and not any(one.inside for one in operations if isinstance(one, Pass)):
                self.step(operations)
                self._repeat(operations, count - 1)
            else:
                for _ in range(count):
                    self.step(operations)

    def _repeat(self, operations: tuple[Operation, ...], times: int) -> None:
        """Steps that leave nothing under way are alike: make one, and count it so often."""
        now, since, steps = self.now, self.since_meeting, self.steps_since
        before, cpu_s = dict(self.spent.terms), self.spent.cpu_s
        self.step(operations)
        self.now = now + (self.now - now) * times
        self.spent.terms = {
            name: before[name] + (seconds - before[name]) * times
            for name, seconds in self.spent.terms.items()
        }
        self.spent.cpu_s = cpu_s + (self.spent.cpu_s - cpu_s) * times
        if self.steps_since > steps:  # there was no meeting in between
            self.since_meeting = since + (self.since_meeting - since) * times
            self.steps_since = steps + times

    def _restart(self) -> None:
        self.spent = Spent()

    def step(self, operations: tuple[Operation, ...]) -> None:
        self.steps_since += 1
        self._spend("session", self.conditions.session_s)
        for operation in operations:
            self._do[type(operation)](operation)

    # What a worker does

    def _spend(self, term: str, seconds: Amount, *, computes: bool = True) -> None:
        self.now = self.now + seconds
        self.spent.terms[term] = self.spent.terms[term] + seconds
        if computes:
            self.spent.cpu_s = self.spent.cpu_s + seconds
            self.since_meeting = self.since_meeting + seconds

    def _work(self, seconds: Amount) -> Amount:
        """Compute, whose time differs between workers and steps: coefficients are of a median step."""
        return seconds * self.average

    def _pass(self, one: Pass) -> None:
        conditions = self.conditions
        began, cost = self.now, conditions.passing
        inside_bytes = sum(each.sent_bytes for _, each in one.inside if isinstance(each, Start))
        length = self._work(cost.compute_s * one.share)
        self._spend("compute", length)
        self._spend("exchange", cost.exchange_s * one.share, computes=False)
        self._spend("waiting", cost.waiting_s * one.share, computes=False)
        stolen = conditions.sent_cpu_s(inside_bytes) if inside_bytes else 0.0
        if one.share == 1.0:
            self._spend("exchange", conditions.shared_add_s + stolen)
        length = self.now - began
        for ready, each in one.inside:
            if isinstance(each, Start):
                self._start(each, began + ready * length)
            elif self.queue:
                self.queue.push(each.sent_bytes, began + ready * length)
        if self.queue:
            self._until(self.queue.writable(began, self.now))

    def _wait_for_others(self, workers: int) -> None:
        """Who meets waits for the slowest, each for about as long as it is expected to be ahead of it."""
        factor = slowest(self.conditions.jitter, workers, self.steps_since) - 1.0
        if factor > 0:
            self._spend("waiting", self.since_meeting * factor, computes=False)
        self.since_meeting, self.steps_since = 0.0, 0

    def _until(self, moment: Amount) -> None:
        """What is still under way, and no computation hides."""
        ahead = later(moment - self.now, 0.0)
        self.now = self.now + ahead
        self.spent.terms["exchange"] = self.spent.terms["exchange"] + ahead

    # Exchanges between replicas

    def _start(self, one: Start, moment: Amount) -> None:
        conditions = self.conditions
        if one.is_swap:
            self._done[one.number] = later(moment, self.link_free) + conditions.swap_s(one.sent_bytes)
            self.link_free = self._done[one.number]
            return
        whole = conditions.sum_s(one.sent_bytes)
        busy = conditions.link_s(one.sent_bytes) if conditions.role.hosts > 1 else whole
        begin = later(moment, self.link_free)
        self.link_free = begin + busy
        self._done[one.number] = begin + later(whole, busy)

    def _await(self, one: Await) -> None:
        done = self._done.pop(one.number, None)
        if done is None or one.seen:
            return
        before = self.now
        self._wait_for_others(self.conditions.role.workers)
        self._until(done + (self.now - before))

    def _sum(self, one: Sum) -> None:
        role = self.conditions.role
        self._wait_for_others(role.workers if one.scope == "replicas" else role.neighbours)
        if one.sent_bytes < LEAST_NUMBERS:
            self._spend("exchange", self.conditions.round_trip_s, computes=False)
            return
        moment = later(self.now, self.link_free) if one.scope == "replicas" else self.now
        self._until(moment + self.conditions.sum_s(one.sent_bytes, one.scope))
        self.link_free = later(self.link_free, self.now)

    def _swap(self, one: Swap) -> None:
        self._wait_for_others(2)
        if one.sent_bytes < LEAST_NUMBERS:
            self._spend("exchange", self.conditions.round_trip_s, computes=False)
        else:
            self._until(self.now + self.conditions.swap_s(one.sent_bytes))

    def _meet(self, one: Meet) -> None:
        self._wait_for_others(self.conditions.role.neighbours)
        self._spend("waiting", self.conditions.meeting_s, computes=False)

    # Servers

    def _push(self, one: PushSpan) -> None:
        if self.queue:
            self.queue.push(one.sent_bytes, self.now)

    def _pushed(self, one: Pushed) -> None:
        queue = self.queue
        if queue is None:
            return
        if queue.gathers:
            self._wait_for_others(queue.team)
            self._until(queue.applied(self.now))
        elif queue.confirms:
            self._until(queue.applied(self.now))

    def _fresh(self, one: Fresh) -> None:
        queue = self.queue
        if queue is None or queue.bound is None or queue.gathers:
            return
        self._until(queue.applied(self.now))
        # A worker may be `bound` steps ahead: it waits as if workers met after so many steps.
        factor = slowest(self.conditions.jitter, self.conditions.role.workers, 1.0) - 1.0
        share = 1.0 / (queue.bound + 1.0)
        self._spend("waiting", self.since_meeting * factor * share, computes=False)
        self.since_meeting, self.steps_since = 0.0, 0

    def _settle(self, one: Settle) -> None:
        if self.queue:
            self._until(self.queue.settled(self.now))

    def _pull(self, one: PullAll) -> None:
        if self.queue:
            self._spend("exchange", self.queue.pull_s(one.received_bytes), computes=False)
