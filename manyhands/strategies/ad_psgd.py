"""AD-PSGD: a worker averages with a random other one whenever it likes; no worker waits for another's computation.

Lian, Zhang, Zhang & Liu 2018 (asynchronous decentralized parallel SGD). Worker i, again and again and at its own pace:

    g ← gradient at x_i,    x_i, x_j ← (x_i + x_j) / 2 with a random j, as one,    x_i ← x_i − lr · g.

The replicas of a host lie side by side in its memory, and a lock for each keeps averages and updates apart. A worker
takes the locks of a pair in the order of their numbers; the paper's two classes of workers serve the same purpose.

No worker reaches into the memory of another host. A pair on two hosts sends copies c_i, c_j on their way, each when it
comes to it, and goes on; when the other's is here,  x_i ← x_i + (c_j − c_i) / 2:  what was learned meanwhile stays,
and so does the mean of all replicas. All workers draw the pairs alike. A worker begins a meeting when its last one is
over, and a pause completes those that some workers have begun.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from manyhands.strategies.extras import BackgroundComm, OpenReplica
from manyhands.strategies.interface import Asked, Share, Steps, Strategy, Traits
from manyhands.strategies.meetings import Meetings
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy):
    """Gossip without waiting: average with a random other worker at one's own pace (AD-PSGD, Lian et al. 2018)."""

    every: int = 1
    # A gradient comes after the average: no other worker has it before the next one.
    traits: ClassVar[Traits] = Traits(steps=Steps.ALONE, replica="open", late=True)

    def __post_init__(self) -> None:
        at_least_one(every=self.every)

    @property
    def period(self) -> int:
        return self.every

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def step(self, replica: OpenReplica, comm: BackgroundComm, share: Share) -> float:
        loss = replica.backward(share)
        neighbours = replica.neighbours
        if (replica.steps - 1) % self.every == 0:  # what this worker learned before this step is averaged
            if neighbours.size > 1:
                draw = random.Random(replica.steps * neighbours.size + neighbours.index)
                ahead = draw.randrange(1, neighbours.size)
                neighbours.average_with((neighbours.index + ahead) % neighbours.size)
            if comm.size > neighbours.size and comm.swap_is_done():
                replica.keep(Meetings).meet(replica, comm)
        with neighbours.held_off():
            replica.apply()
        return loss

    def agree(self, replica: OpenReplica, comm: BackgroundComm) -> None:
        if comm.size > replica.neighbours.size:
            state = replica.keep(Meetings)
            most = comm.most_of(state.meetings)
            while state.meetings < most:
                state.meet(replica, comm)
            state.finish(replica, comm)
        comm.mean_(replica.params)
