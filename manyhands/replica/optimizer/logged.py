"""Updates that the survivors can finish if one of their workers dies in the middle.

Every update is written to the undo log. No worker updates a span before all have passed a gate, so a step that any
worker has begun to apply is complete in memory that all see: survivors repair what the dead were changing, and update
the spans that are left.
"""

import itertools
from collections.abc import Collection

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.replica.barrier_group import BarrierGroup
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.layout import Span
from manyhands.replica.memory import Team
from manyhands.replica.optimizer.undo_log import UndoLog
from manyhands.replica.optimizer.update_path import Factor, Gate, UpdatePath, unlimited
from manyhands.replica.optimizer.updates import Updates


class LoggedPath(UpdatePath):
    """Notes every update in the undo log of the host, and finishes those of dead workers."""

    is_logged = True

    def __init__(
        self,
        updates: Updates,
        gradients: Gradients,
        gate: Gate,
        log: UndoLog,
        team: Team,
        group: BarrierGroup,
    ) -> None:
        """`group` are the workers with which the team makes its steps."""
        super().__init__(updates, gradients, gate)
        self.log = log
        self._team = team
        self._group = group
        self._meetings = group.host.progress()

    def make(self, span: Span, gradient: Tensor) -> None:
        with telemetry.timed("update"):
            self.log.update(self.updates, span, gradient, self.skipped, self._gradients.step)

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
        mine = left[survivors.index(self._team.index) :: len(survivors)]
        updates.take_from_others(mine)
        scale = factor() if mine else 1.0
        for span in mine:
            self.make(span, self._gradients.recompute(span) * scale)
        self._meet(everyone, next(meetings))
        updates.take_from_others(self._gradients.spans)
        return steps

    def _meet(self, survivors: Collection[int], meeting: int) -> None:
        """All survivors have come as far; the meetings of one recovery have growing numbers."""
        self._meetings.publish(meeting)
        for peer in survivors:
            self._meetings.wait_for(peer, meeting)


def skipped_in(used: Tensor) -> frozenset[int]:
    """The parameters whose flag is not set."""
    return frozenset(torch.nonzero(used == 0).flatten().tolist())
