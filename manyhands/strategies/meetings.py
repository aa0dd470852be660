"""Meetings of pairs of workers on different hosts, in the background: each worker comes when it likes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.extras import BackgroundComm, OpenReplica
from manyhands.strategies.partners import partner

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Meetings:
    """What a worker keeps of them."""

    meetings: int = 0  # begun; at a pause the same on all workers
    copy: "Tensor | None" = None  # what this worker has sent, in the meeting that is in flight

    def meet(self, replica: OpenReplica, comm: BackgroundComm) -> None:
        """Finish the last meeting, and begin the next."""
        self.finish(replica, comm)
        self.meetings += 1
        peer = partner(comm.rank, comm.size, self.meetings)
        if peer not in replica.neighbours.ranks:  # with those the worker averages anyway
            with replica.neighbours.held_off():
                self.copy = replica.params.clone()
            comm.start_swap(peer, self.copy)

    def finish(self, replica: OpenReplica, comm: BackgroundComm) -> None:
        """Both get the mean of the two copies, and keep what they have learned since: x ← x + (theirs − copy) / 2."""
        theirs = comm.finish_swap()
        if theirs is not None and self.copy is not None:
            difference = theirs.sub_(self.copy).mul_(0.5)
            self.copy = None
            with replica.neighbours.held_off():
                replica.params.add_(difference)
