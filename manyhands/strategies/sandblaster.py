"""Sandblaster: L-BFGS over one large batch, whose portions go to whichever worker is free.

Dean et al. 2012 (DistBelief). The batch of a step is what all workers have brought, cut into portions. L-BFGS evaluates
the loss several times in a step, and for each evaluation

    every worker    takes a portion, adds its gradient to what it has, and takes another until there is none left
    the servers     add up what the workers have:  g = Σ b_p g_p / Σ b_p  over the portions p of b_p samples
    worker 0        is the coordinator: it has the servers compute dot products and sums of vectors, decides by these
                    numbers alone, and has x ← x + t · d done where x and d are: on the servers

A slow worker takes fewer portions, and no worker waits longer than for one. The history of L-BFGS is spread over the
servers. They keep the parameters from before the step: if a worker dies in it, the others begin it again from there,
and L-BFGS without a history.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from manyhands.servers.protocol.consistency import SYNC
from manyhands.servers.protocol.service import Service
from manyhands.strategies.extras import Coordinated, Portion, Portions
from manyhands.strategies.interface import ReplicaView, Served, Share, Steps, Traits
from manyhands.strategies.refusals import at_least_one

AGAIN, ENOUGH = 1.0, 0.0


@dataclass(frozen=True, kw_only=True)
class Sandblaster(Served):
    """L-BFGS over a large batch; fast workers take more portions of it (Dean et al. 2012)."""

    portion: int = 32  # samples
    # The clock decides which worker computes which portion, and so the order of additions.
    traits: ClassVar[Traits] = Traits(steps=Steps.SYNCHRONOUS, by_clock=True, servers=Service(rule=SYNC))

    def __post_init__(self) -> None:
        at_least_one(portion=self.portion)

    def step(self, replica: ReplicaView, servers: Coordinated, share: Share) -> float:
        portions, losses = servers.portions(share, self.portion), list[float]()

        def evaluate() -> float:
            losses.append(self._loss(replica, servers, share, portions))
            return losses[-1]

        def coordinate() -> float:
            servers.begin_evaluation(len(portions))
            servers.comm.sum_of(AGAIN)
            return evaluate()

        if servers.comm.rank == 0:
            if portions:
                servers.minimize(coordinate)
            servers.begin_evaluation(0)  # all that was asked of the servers is done
            servers.comm.sum_of(ENOUGH)
        else:
            while servers.comm.sum_of(0.0) == AGAIN:
                evaluate()
        servers.pull()  # the script, or another session, may use the model between two steps
        return losses[0] if losses else float("nan")

    def _loss(self, replica: ReplicaView, servers: Coordinated, share: Share, portions: Portions) -> float:
        """The loss over all portions, of which this worker computes as many as it comes to."""
        taken = 0

        def mine() -> Iterator[Portion]:
            nonlocal taken
            while (index := servers.next_portion()) is not None:
                taken += portions[index][1]
                yield portions[index]

        servers.pull()
        loss = replica.backward(replace(share, parts=mine()))
        if taken:
            servers.add_gradient()
        return servers.comm.sum_of(loss * taken / share.total() if taken else 0.0)

    def agree(self, replica: ReplicaView, servers: Coordinated) -> None:
        servers.pull()
