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

from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy):
    """A host's workers update one replica without waiting; hosts average (Niu et al. 2011; PyTorch; H2O)."""

    average_every: int | None = None  # steps of a host's first worker; at pauses only where not given

    shares_replica: ClassVar[bool] = True
    lockstep: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.average_every is not None:
            at_least_one(average_every=self.average_every)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def updates_late(self, workers: int, hosts: int = 1) -> int:
        return -(-workers // hosts) - 1  # every host has a replica of its own

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        loss = replica.backward(share)
        replica.apply()
        if self.average_every and comm.size > 1 and replica.leads and comm.sum_is_done():
            self._finish_round(replica, comm)
            if replica.steps % self.average_every == 0:
                self._begin_round(replica, comm)
        return loss

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        if not replica.leads:
            return
        rounds = float(self._rounds(replica))
        if comm.most_of(rounds) > rounds:
            self._begin_round(replica, comm)
        self._finish_round(replica, comm)
        comm.mean_(replica.params)
        replica.kept.clear()  # a pause leaves nothing under way

    def _begin_round(self, replica: "Replica", comm: "Comm") -> None:
        self._finish_round(replica, comm)
        copy = replica.keep("copy", replica.params)
        comm.start_sum(replica.keep("mean", copy))
        self._rounds(replica).add_(1)

    def _finish_round(self, replica: "Replica", comm: "Comm") -> None:
        comm.finish_sum()
        if "mean" in replica.kept:
            mean = replica.kept.pop("mean").div_(comm.size)
            replica.params.add_(mean.sub_(replica.kept.pop("copy")))

    def _rounds(self, replica: "Replica") -> "Tensor":
        """How many this host has begun since the last pause."""
        return replica.keep("rounds", replica.params.new_zeros(1).double())
