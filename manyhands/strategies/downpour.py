"""Downpour: workers fetch parameters and push gradients every few steps, and nobody waits for anybody.

Dean et al. 2012 (DistBelief). Every worker has a copy x of the servers' parameters w and does, in step t,

    x ← w                    if fetch divides t
    g ← gradient at x,    a ← a + g,    x ← x − lr · g
    push a,  a ← 0           if push divides t + 1

The servers apply what is pushed with the user's optimizer, as it comes; the paper recommends Adagrad, whose rates
shrink where much has been pushed already and so bear staleness well. A worker fetches what has its own pushes in it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from manyhands.servers.protocol.consistency import Consistency
from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Comm, ServedDirectly
    from manyhands.replica.replica import Replica, Share

ACCRUED = "accrued"


@dataclass(frozen=True, kw_only=True)
class Downpour(Strategy):
    """Fetch parameters every `fetch` steps, push gradients every `push`, wait for nobody (Dean et al. 2012)."""

    fetch: int = 1
    push: int = 1

    lockstep: ClassVar[bool] = False
    rule: ClassVar[Consistency] = Consistency(fetches=True)
    optimizer: ClassVar[str] = "adagrad:lr=0.02"

    def __post_init__(self) -> None:
        at_least_one(fetch=self.fetch, push=self.push)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def batches_per_update(self, workers: int, hosts: int = 1) -> int:
        return self.push

    def updates_late(self, workers: int, hosts: int = 1) -> int:
        """A gradient's parameters are (fetch − 1) / 2 steps old, and it waits (push − 1) / 2 steps for its push; each
        of the others makes an update in every `push` steps."""
        return -(-(workers - 1) * (self.fetch + self.push) // (2 * self.push))

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        servers = comm.servers
        assert servers is not None
        if replica.steps % self.fetch == 0:
            servers.settle()
            servers.pull(whole=self.fetch > 1)  # between fetches this worker changes its copy
        if self.push == 1:
            loss = replica.backward(servers.held(share), on_ready=servers.push)
            servers.finish()
        else:
            loss = replica.backward(servers.held(share))
        if self.fetch > 1:
            replica.descend()
        if self.push > 1:
            accrued = self._accrued(replica)
            if replica.steps % self.push == 0:
                self._push(replica, comm, accrued)
            else:
                replica.kept[ACCRUED] = accrued
        return loss

    def _accrued(self, replica: "Replica") -> "Tensor":
        """The sum of gradients, and of flags: which parameters got one. What is kept is left alone: should the push
        fail, the step is made again."""
        length = len(replica.params)
        before = replica.kept.get(ACCRUED)
        accrued = replica.params.new_zeros(length + len(replica.used)) if before is None else before.clone()
        accrued[:length].add_(replica.grads)
        accrued[length:].add_(replica.used)
        return accrued

    def _push(self, replica: "Replica", comm: "Comm", accrued: "Tensor") -> None:
        length = len(replica.params)
        cast("ServedDirectly", comm.servers).give(accrued[:length], accrued[length:])
        replica.kept.pop(ACCRUED, None)

    def holds_back(self, replica: "Replica", comm: "Comm") -> bool:
        return ACCRUED in replica.kept

    def leave(self, replica: "Replica", comm: "Comm") -> None:
        assert comm.servers is not None
        if ACCRUED in replica.kept:
            self._push(replica, comm, replica.kept[ACCRUED])  # a pause leaves nothing behind
        comm.servers.leave(lambda share: None)  # no neighbour needs this worker

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        assert comm.servers is not None
        comm.servers.settle()
        comm.sum_of(0.0)  # everyone's gradients are applied
        comm.servers.pull()
