"""The undo log: what an owner is about to change, where the others can read it and finish its work if it dies.

Before an optimizer updates a span, its parameters and its optimizer state are copied to a place that is used again for
every span, and so stays in the cache. If the owner dies in the middle, the survivors put the copy back. Updates made of
passes that can be made again (`Descent`) copy nothing: which pass is going on is written down, and the survivors go on
from there. Which spans of this step are done, and which are not, is written down as well. The gradients of a step that
has passed its gate are in common memory: the survivors update the rest.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.replica.barrier_group import BarrierGroup
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.layout import Layout, Span, table_rows
from manyhands.replica.memory import Team
from manyhands.replica.optimizer.updates import Factor, StepGate, UpdatePath, Updates, skipped_in, unlimited

Allocate = Callable[[int, torch.dtype], Tensor]

_STAGES = 4  # a copy was made, or one of the three passes of a descent


class UndoLog:
    """The spans of one step that are done, and for each owner the span it is changing, as it was before.

    `allocate` gives memory that all owners see; this one has the number `mine`.
    """

    def __init__(
        self,
        layout: Layout,
        vectors: Sequence[Tensor],
        numbers: Tensor,
        allocate: Allocate,
        *,
        owners: int,
        mine: int,
    ) -> None:
        self._mine = mine
        self._vectors = vectors
        self._numbers = numbers  # by place of a span
        self._rows = table_rows(layout)
        longest = max(span.stop - span.start for span in layout.spans)
        self._values_before = [
            allocate(owners * longest, vector.dtype).view(owners, longest) for vector in vectors
        ]
        self._scratches = allocate(owners * longest, vectors[0].dtype).view(owners, longest)
        # What this owner's descents pass through; a gradient may be made there, to be found in the cache.
        self.scratch = self._scratches[mine]
        most = max(len(span.places) for span in layout.spans)
        size = owners * most * numbers.shape[1]
        self._numbers_before = allocate(size, numbers.dtype).view(owners, most, numbers.shape[1])
        # By owner: which span, and at what stage; or 0. One word, so that it is never half written.
        self._changing = allocate(owners, torch.int64).numpy()
        # By span: the last step that is in it.
        self._done = allocate(len(layout.spans), torch.int64).numpy()
        self._layout = layout

    def _begin(self, span: Span) -> None:
        """This owner is about to update a span."""
        mine, length = self._mine, span.stop - span.start
        for before, vector in zip(self._values_before, self._vectors, strict=True):
            before[mine, :length].copy_(vector[span.slice])
        if self._numbers.shape[1]:
            self._numbers_before[mine, : len(span.places)].copy_(self._numbers[self._rows[span.index]])
        self._note(mine, span, 0)

    def _note(self, owner: int, span: Span, stage: int) -> None:
        self._changing[owner] = 1 + span.index * _STAGES + stage

    def update(
        self, updates: Updates, span: Span, gradient: Tensor, skipped: frozenset[int], step: int
    ) -> None:
        """`updates.apply`, with notes from which a survivor can finish it."""
        descent = None if gradient.is_sparse else updates.descent(span, skipped)
        if descent:
            scratch = self.scratch[: len(descent.params)]
            descent.make(gradient, scratch, partial(self._note, self._mine, span))
        else:
            self._begin(span)
            updates.apply(span, gradient, skipped)
        self.end(span, step)

    def end(self, span: Span, step: int) -> None:
        """A step is in a span."""
        self._done[span.index] = step
        self._changing[self._mine] = 0

    def has(self, span: Span, step: int) -> bool:
        """Whether a step is in a span."""
        return bool(self._done[span.index] >= step)

    def repair(self, updates: Updates, owner: int, step: int) -> None:
        """Put back what a dead owner was changing in a step, or finish it."""
        span, stage = self._found(owner)
        if span is not None and stage:
            begun = updates.begun_descent(span)
            scratch = self._scratches[owner, : len(begun.params)]
            begun.go_on(stage, scratch, partial(self._note, owner, span))
            self._done[span.index] = step
            self._changing[owner] = 0
        elif span is not None:
            self._undo(owner, span)

    def _undo(self, owner: int, span: Span) -> None:
        """Put back what a dead owner was changing by its optimizer."""
        for before, vector in zip(self._values_before, self._vectors, strict=True):
            vector[span.slice].copy_(before[owner, : span.stop - span.start])
        if self._numbers.shape[1]:
            self._numbers[self._rows[span.index]] = self._numbers_before[owner, : len(span.places)]
        # In this order: if this process dies as well, another one does it again.
        self._done[span.index] = 0
        self._changing[owner] = 0

    def _found(self, owner: int) -> tuple[Span | None, int]:
        """What an owner was changing, and at what stage."""
        if not self._changing[owner]:
            return None, 0
        index, stage = divmod(int(self._changing[owner]) - 1, _STAGES)
        return self._layout.spans[index], stage

    def left(self, step: int) -> list[Span]:
        """The spans that this step has not reached."""
        return [span for span in self._layout.spans if not self.has(span, step)]


class NotedPath(UpdatePath):
    """Notes every update in an undo log, and finishes those of dead workers by what it says."""

    def __init__(self, updates: Updates, gradients: Gradients, gate: StepGate, log: UndoLog) -> None:
        super().__init__(updates, gradients, gate)
        self.log = log

    @property
    def step(self) -> int:
        """The step that is made."""
        return self._gradients.step

    def make(self, span: Span, gradient: Tensor) -> None:
        with telemetry.timed("update"):
            self.log.update(self.updates, span, gradient, self.skipped, self.step)

    def finish(self, spans: Sequence[Span], factor: Factor) -> None:
        """Update spans that the step has not reached, by a sum that is complete; `factor` limits it."""
        self.updates.take_from_others(spans)
        scale = factor() if spans else 1.0
        for span in spans if not math.isnan(scale) else ():
            self.make(span, self._gradients.recompute(span) * scale)


class LoggedPath(NotedPath):
    """The path of workers that finish, together, what those of them that die have begun."""

    is_logged = True

    def __init__(
        self,
        updates: Updates,
        gradients: Gradients,
        gate: StepGate,
        log: UndoLog,
        team: Team,
        group: BarrierGroup,
    ) -> None:
        """`group` are the workers with which the team makes its steps."""
        super().__init__(updates, gradients, gate, log)
        self._team = team
        self._group = group
        self._meetings = group.host.progress()

    def recover(self, dead: Collection[int], attempt: int, factor: Factor = unlimited) -> int:
        """Some workers of this host (by index in it) are gone for good; called by all others, which have left whatever
        they were doing.

        Makes the replica that of a whole step: of the last one that all workers, the dead included, have brought to
        the gate. Returns how many steps that are. Afterwards every survivor alone can tell the whole state. If this
        raises `PeerLost`, because another worker dies meanwhile, all call it again with all that are gone, and with a
        higher `attempt`. `factor` limits the gradient.
        """
        group, updates = self._group, self.updates
        group.host.forget(dead)
        everyone = [index for index in range(group.host.size) if index not in dead]
        survivors = [index for index, place in enumerate(group.own) if place not in dead]
        meetings = itertools.count(attempt * 8)
        self._meet(everyone, next(meetings))  # from here on no worker changes anything but below
        steps = self.gate.begun
        if self._team.index == survivors[0]:
            for worker in sorted(set(range(self._team.size)) - set(survivors)):
                self.log.repair(updates, worker, steps)
        self._meet(everyone, next(meetings))
        left = self.log.left(steps)
        self._meet(everyone, next(meetings))  # all have the same list
        if not self.gate.hears_from_hosts:
            self.skipped = skipped_in(self._gradients.used)
        self.finish(left[survivors.index(self._team.index) :: len(survivors)], factor)
        self._meet(everyone, next(meetings))
        updates.take_from_others(self._gradients.spans)
        return steps

    def _meet(self, survivors: Collection[int], meeting: int) -> None:
        """All survivors have come as far; the meetings of one recovery have growing numbers."""
        self._meetings.publish(meeting)
        for peer in survivors:
            self._meetings.wait_for(peer, meeting)


class LeftPath(NotedPath):
    """The path of a part whose workers are all gone: the worker that takes it over finishes the last of its steps that
    counts, alone."""

    def __init__(
        self, updates: Updates, gradients: Gradients, gate: StepGate, log: UndoLog, steps: int
    ) -> None:
        super().__init__(updates, gradients, gate, log)
        self._steps = steps

    @property
    def step(self) -> int:
        return self._steps

    def recover(self, dead: Collection[int], attempt: int, factor: Factor = unlimited) -> int:
        for worker in dead:
            self.log.repair(self.updates, worker, self._steps)
        self.skipped = skipped_in(self._gradients.used)
        self.finish(self.log.left(self._steps), factor)
        self.updates.take_from_others(self._gradients.spans)
        return self._steps
