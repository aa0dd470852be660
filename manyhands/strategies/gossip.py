"""Gossip: workers meet in pairs and average, and news spreads from pair to pair.

GoSGD, Blot et al. 2016; Theano-MPI has it. Every `every` steps all workers pair up at random, and with x_i, x_j the
parameters of a pair

    x_i, x_j ← (x_i + x_j) / 2.

The mean of all replicas stays what it is, and after about log2 n meetings each worker has something of all others. A
message goes to one peer only, however many workers there are. The paper's workers send without waiting; here a pair
meets in step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.strategies.interface import Asked, CommView, ReplicaView, Share, Strategy
from manyhands.strategies.partners import pairs, partner
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step


@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """Random pairs of workers average their parameters every `every` steps (GoSGD, Blot et al. 2016; Theano-MPI)."""

    every: int = 1

    def __post_init__(self) -> None:
        at_least_one(every=self.every)

    @property
    def period(self) -> int:
        return self.every

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def who_meets(self, steps: int, hosts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        return pairs(sum(map(len, hosts)), (steps + 1) // self.every)

    def step(self, replica: ReplicaView, comm: CommView, share: Share) -> float:
        loss = replica.backward(share)
        replica.apply()
        if replica.steps % self.every == 0:
            peer = partner(comm.rank, comm.size, replica.steps // self.every)
            replica.params.add_(comm.swap(peer, replica.params)).mul_(0.5)
        return loss

    def agree(self, replica: ReplicaView, comm: CommView) -> None:
        comm.mean_(replica.params)
