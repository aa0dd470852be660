"""AD-PSGD: a worker averages with a random neighbour whenever it likes; nobody waits for anybody's computation.

Lian, Zhang, Zhang & Liu 2018 (asynchronous decentralized parallel SGD). Worker i, again and again and at its own pace:

    g ← gradient at x_i,    x_i, x_j ← (x_i + x_j) / 2 with a random j, as one,    x_i ← x_i − lr · g.

The replicas of a host lie side by side in its memory, and a lock for each keeps averages and updates apart. A worker
takes the locks of a pair in the order of their numbers; the paper's two classes of workers serve the same purpose.
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.errors import UsageError
from manyhands.strategies.settings import at_least_one, one_gradient_per_step
from manyhands.strategies.strategy import Asked, Strategy

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy):
    """Gossip without waiting: average with a random neighbour at one's own pace (AD-PSGD, Lian et al. 2018)."""

    every: int = 1

    lockstep: ClassVar[bool] = False
    open_replica: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one(every=self.every)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)
        if asked.hosts is not None and asked.hosts > 1:
            raise UsageError(
                f"ad-psgd averages in the memory of one host, and these workers are on {asked.hosts}; "
                "use --strategy gossip"
            )

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        loss = replica.backward(share)
        neighbours = replica.neighbours
        if neighbours.size > 1 and replica.steps % self.every == 0:
            draw = random.Random(replica.steps * neighbours.size + neighbours.index)
            ahead = draw.randrange(1, neighbours.size)
            neighbours.average_with((neighbours.index + ahead) % neighbours.size)
        with neighbours.held_off():
            replica.apply()
        return loss

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        comm.mean_(replica.params)
