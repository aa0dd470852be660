"""Gradients of layers that are pushed every few steps only (Nexus): they wait here, and their mean is pushed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from manyhands.servers.protocol.ownership import SpanGroup


@dataclass(frozen=True, kw_only=True)
class Mean:
    """What is pushed of a group for several steps."""

    gradient: Tensor | None  # None: there was none in any of them
    missing: set[int]  # parameters that got no gradient in any of them
    seen: int  # the group's version on which the first was computed


@dataclass(frozen=True, kw_only=True)
class DeferredGradients:
    """What there is of some steps."""

    steps: int = 0
    total: Tensor | None = None
    missing: frozenset[int] = frozenset()
    seen: int = 0


class Deferral:
    """The gradients of one group since its last push; of a table, those of some rows."""

    def __init__(self, deferred: DeferredGradients | None = None) -> None:
        self.deferred = self._before = deferred or DeferredGradients()

    @property
    def steps(self) -> int:
        return self.deferred.steps

    def wait_for(self, steps: int) -> None:
        """Other workers have deferred so many: those that are missing here were empty."""
        self.deferred = self._before = replace(self.deferred, steps=steps)

    def settle(self) -> None:
        """The step is made, and no worker takes it back any more."""
        self._before = self.deferred

    def take_back(self) -> None:
        """The step will be made again."""
        self.deferred = self._before

    def add(self, gradient: Tensor | None, missing: set[int], seen: int) -> None:
        """One more step; None where this worker had no samples in it."""
        before, total, lacks = self.deferred, self.deferred.total, self.deferred.missing
        if gradient is not None and total is not None:
            lacks, total = lacks & missing, total + gradient  # not in place: it may be taken back
        elif gradient is not None:
            lacks, total = frozenset(missing), gradient.clone()
        self.deferred = DeferredGradients(
            steps=before.steps + 1, total=total, missing=lacks, seen=before.seen if before.steps else seen
        )

    def take(self) -> Mean:
        """What there is, and begin anew."""
        taken, self.deferred = self.deferred, DeferredGradients()
        return Mean(
            gradient=None if taken.total is None else taken.total / taken.steps,
            missing=set(taken.missing),
            seen=taken.seen,
        )


class Deferrals:
    """What a worker defers, of those groups that are not pushed in every step."""

    def __init__(self, groups: Sequence[SpanGroup]) -> None:
        self.groups = [group for group in groups if group.every > 1]
        self.by_group = {group.index: Deferral() for group in self.groups}

    @property
    def waiting(self) -> list[tuple[SpanGroup, Deferral]]:
        """The groups that have something to push."""
        return [(group, one) for group in self.groups if (one := self.by_group[group.index]).steps]

    def end_step(self) -> None:
        """The worker has pushed all of a step, and is about to tell the servers so."""

    def settle(self) -> None:
        for one in self.by_group.values():
            one.settle()

    def recall(self, serial: int) -> None:
        """Go on with what the worker that spoke for this host deferred, after so many steps and flushes."""

    def take_over(self, before: "Deferrals", *, counts: bool) -> None:
        """Go on with what this worker deferred in the generation before; `counts` is whether the step that it was
        making, if any, is not made again."""
        for index, one in before.by_group.items():
            if not counts:
                one.take_back()
            one.settle()
            self.by_group[index] = one

    @property
    def steps(self) -> list[float]:
        """How many steps are deferred, of groups by how often they are pushed."""
        every = {group.every: self.by_group[group.index] for group in self.groups}
        return [float(every[number].steps) for number in sorted(every)]

    def align(self, everyone: Sequence[Sequence[float]]) -> None:
        """Where all workers push the same groups in a step, one that is new waits with the others."""
        numbers = sorted({group.every for group in self.groups})
        for group in self.groups:
            steps = max(row[numbers.index(group.every)] for row in everyone)
            self.by_group[group.index].wait_for(int(steps))
