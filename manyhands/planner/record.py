"""What a strategy does in a step, found by running its own `step` on a replica and a comm without numbers.

So a strategy that is new is priced as it is, without a formula of its own. Steps are recorded until they repeat: a
period is what averages are taken over, since a typical step of a strategy that exchanges now and then tells little.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

from manyhands.planner.flat_vector import FlatVector
from manyhands.planner.operations import Meet, Operation, StepOperations
from manyhands.planner.roles import Role, SpanFacts
from manyhands.planner.stand_ins import RecordedComm, RecordedReplica, RecordedServers, Tape
from manyhands.replica.share import Share
from manyhands.strategies import Strategy, Traits

MOST_STEPS = 1024
LEAST_IRREGULAR = 64
"""Steps to record where none repeats, as of pairs drawn by lot."""


@dataclass(frozen=True)
class Recorded:
    """One period of a strategy's steps."""

    steps: tuple[StepOperations, ...]
    repeats: bool
    """Whether the steps repeat; otherwise this is all that was recorded."""
    kept_bytes: float
    """Of the vectors that the strategy keeps on every worker."""

    @cached_property
    def runs(self) -> tuple[tuple[StepOperations, int], ...]:
        """Equal steps that follow each other, and how many they are."""
        return tuple((step, len(list(equal))) for step, equal in itertools.groupby(self.steps))


@lru_cache(maxsize=4096)
def record(strategy: Strategy, role: Role, spans: SpanFacts) -> Recorded:
    """Run the strategy's steps on this role, without numbers."""
    counts = [value for field in fields(strategy) if type(value := getattr(strategy, field.name)) is int]
    least = min(MOST_STEPS, 2 * max([1, strategy.period, *counts]) + 2)
    tape = Tape()
    traits = strategy.traits
    replica = RecordedReplica(tape, role, spans, traits)
    comm = RecordedComm(tape, role, streams=traits.topology != "native" and role.hosts > 1)
    other = RecordedServers(tape, role, spans, comm, replica) if traits.servers else comm
    steps: list[StepOperations] = []
    period = 0
    while not period and len(steps) < max(least, LEAST_IRREGULAR):
        for _ in range(least if len(steps) < least else LEAST_IRREGULAR):
            tape.begin()
            share = Share(parts=[(None, role.samples)], samples=role.samples, total=_total(role))
            strategy.step(replica, other, share)
            steps.append((*_before(traits, role), *tape.taken(), *_after(traits, role)))
        period = _period(steps[1:])
    kept = sum(each.nbytes for each in vars(replica.kept).values() if isinstance(each, FlatVector))
    return Recorded(tuple(steps[-period:] if period else steps[1:]), period > 0, float(kept))


def _total(role: Role) -> Callable[[], float]:
    return lambda: float(role.samples * role.workers)


def _before(traits: Traits, role: Role) -> StepOperations:
    """The handshake of a step that workers make together: each hears its own host at once."""
    together = traits.lockstep and role.workers > 1
    return (Meet("host"),) if together and role.neighbours > 1 else ()


def _after(traits: Traits, role: Role) -> StepOperations:
    """The commit barrier where a host's workers share a replica and step together."""
    return (Meet("host"),) if role.shares_replica and traits.lockstep and role.neighbours > 1 else ()


def _period(steps: list[tuple[Operation, ...]]) -> int:
    """The smallest number of steps after which all of them repeat; 0: they do not."""
    for period in range(1, len(steps) // 2 + 1):
        if all(steps[at] == steps[at + period] for at in range(len(steps) - period)):
            return period
    return 0
