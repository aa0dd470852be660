"""Hogwild: the workers of a host update one replica in shared memory, without locks and without waiting.

Niu, Recht, Ré & Wright 2011. With x the host's parameters, every worker does, for ever and whenever it is ready,

    g ← gradient at whatever x it reads,    x ← x − lr · g.

H2O does this on the cores of a node and averages the nodes' parameters now and then. So do hosts here, and without
waiting either: every `average_every` of its own steps the first worker of a host sends a copy c of x on its way to the
other hosts and goes on. When the mean m of all copies has come back,  x ← x + (m − c):  what was learned
meanwhile stays. A round begins when every host has sent its copy of the one before, so hosts are never more than one
round apart, and a pause completes the round that some have begun.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.strategies.extras import BackgroundComm, HostReplica
from manyhands.strategies.interface import Asked, Share, Steps, Strategy, Traits
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Rounds:
    """What a host's first worker keeps until the next pause."""

    rounds: int = 0  # that this host has begun
    copy: "Tensor | None" = None  # of the round in flight
    mean: "Tensor | None" = None


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy):
    """A host's workers update one replica without waiting; hosts average (Niu et al. 2011; PyTorch; H2O)."""

    average_every: int | None = None  # steps of a host's first worker; at pauses only where not given
    traits: ClassVar[Traits] = Traits(steps=Steps.ALONE, replica="shared")

    def __post_init__(self) -> None:
        at_least_one(average_every=self.average_every)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def step(self, replica: HostReplica, comm: BackgroundComm, share: Share) -> float:
        loss = replica.backward(share)
        replica.apply()
        if self.average_every and comm.size > 1 and replica.leads and comm.sum_is_done():
            self._finish_round(replica, comm)
            if replica.steps % self.average_every == 0:
                self._begin_round(replica, comm)
        return loss

    def agree(self, replica: HostReplica, comm: BackgroundComm) -> None:
        if replica.leads:
            state = replica.keep(Rounds)
            if comm.most_of(state.rounds) > state.rounds:
                self._begin_round(replica, comm)
            self._finish_round(replica, comm)
            comm.mean_(replica.params)
            state.rounds = 0

    def _begin_round(self, replica: HostReplica, comm: BackgroundComm) -> None:
        self._finish_round(replica, comm)
        state = replica.keep(Rounds)
        state.copy, state.mean = replica.params.clone(), replica.params.clone()
        comm.start_sum(state.mean)
        state.rounds += 1

    def _finish_round(self, replica: HostReplica, comm: BackgroundComm) -> None:
        comm.finish_sum()
        state = replica.keep(Rounds)
        if state.copy is not None and state.mean is not None:
            replica.params.add_(state.mean.div_(comm.size).sub_(state.copy))
            state.copy = state.mean = None
