"""AD-PSGD: a worker averages with a random other one whenever it likes; nobody waits for anybody's computation.

Lian, Zhang, Zhang & Liu 2018 (asynchronous decentralized parallel SGD). Worker i, again and again and at its own pace:

    g ← gradient at x_i,    x_i, x_j ← (x_i + x_j) / 2 with a random j, as one,    x_i ← x_i − lr · g.

The replicas of a host lie side by side in its memory, and a lock for each keeps averages and updates apart. A worker
takes the locks of a pair in the order of their numbers; the paper's two classes of workers serve the same purpose.

Into the memory of another host nobody reaches. There a pair sends copies c_i, c_j on their way, each when it comes to
it, and goes on; when the other's has come,  x_i ← x_i + (c_j − c_i) / 2:  what was learned meanwhile stays, and the
mean of all replicas is kept. Who meets whom is drawn by all alike. A worker begins a meeting when its last one is over,
and a pause completes those that some have begun.
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.partners import partner
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy):
    """Gossip without waiting: average with a random other worker at one's own pace (AD-PSGD, Lian et al. 2018)."""

    every: int = 1

    lockstep: ClassVar[bool] = False
    open_replica: ClassVar[bool] = True
    late: ClassVar[bool] = (
        True  # a gradient comes after the average: no other worker has it before the next one
    )

    def __post_init__(self) -> None:
        at_least_one(every=self.every)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def meets(self, steps: int) -> bool:
        return steps % self.every == 0

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        loss = replica.backward(share)
        neighbours = replica.neighbours
        if replica.steps % self.every == 0:
            if neighbours.size > 1:
                draw = random.Random(replica.steps * neighbours.size + neighbours.index)
                ahead = draw.randrange(1, neighbours.size)
                neighbours.average_with((neighbours.index + ahead) % neighbours.size)
            if comm.size > neighbours.size and comm.swap_is_done():
                self._finish_meeting(replica, comm)
                self._begin_meeting(replica, comm)
        with neighbours.held_off():
            replica.apply()
        return loss

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        if comm.size > replica.neighbours.size:
            most = comm.most_of(float(self._meetings(replica)))
            while self._meetings(replica) < most:
                self._finish_meeting(replica, comm)
                self._begin_meeting(replica, comm)
            self._finish_meeting(replica, comm)
        comm.mean_(replica.params)

    def _begin_meeting(self, replica: "Replica", comm: "Comm") -> None:
        peer = partner(comm.rank, comm.size, int(self._meetings(replica).add_(1)))
        if peer not in replica.neighbours.ranks:  # with those it averages anyway
            with replica.neighbours.held_off():
                copy = replica.keep("copy", replica.params)
            comm.start_swap(peer, copy)

    def _finish_meeting(self, replica: "Replica", comm: "Comm") -> None:
        theirs = comm.finish_swap()
        if theirs is not None:
            difference = theirs.sub_(replica.kept.pop("copy")).mul_(0.5)
            with replica.neighbours.held_off():
                replica.params.add_(difference)

    def _meetings(self, replica: "Replica") -> "Tensor":
        """How many this worker has begun; at a pause all have begun the same."""
        return replica.keep("meetings", replica.params.new_zeros(1).double())
