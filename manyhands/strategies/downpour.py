"""Downpour: workers fetch parameters and push gradients every few steps, and none waits for another.

Dean et al. 2012 (DistBelief). Every worker has a copy x of the servers' parameters w and does, in step t,

    x ← w                    if fetch divides t
    g ← gradient at x,    a ← a + g,    x ← x − lr · g
    push a,  a ← 0           if push divides t + 1

The servers apply what is pushed with the user's optimizer, as it comes; the paper recommends Adagrad, whose rates
shrink where much has been pushed already and so bear staleness well. A worker fetches what has its own pushes in it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.servers.protocol.consistency import Consistency
from manyhands.servers.protocol.service import Service
from manyhands.strategies.extras import Descending, DirectServers
from manyhands.strategies.interface import Asked, Served, Share, Steps, Traits
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Unpushed:
    """What a worker keeps between two pushes: a, and for each parameter how many gradients are in it."""

    accrued: "Tensor | None" = None


@dataclass(frozen=True, kw_only=True)
class Downpour(Served):
    """Fetch parameters every `fetch` steps, push gradients every `push`, wait for no worker (Dean et al. 2012)."""

    fetch: int = 1
    push: int = 1
    traits: ClassVar[Traits] = Traits(steps=Steps.ALONE, servers=Service(rule=Consistency(fetches=True)))

    def __post_init__(self) -> None:
        at_least_one(fetch=self.fetch, push=self.push)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def step(self, replica: Descending, servers: DirectServers, share: Share) -> float:
        if replica.steps % self.fetch == 0:
            servers.settle()
            servers.pull(whole=self.fetch > 1)  # between fetches this worker changes its copy
        loss = replica.backward(servers.begin(share), on_ready=servers.push if self.push == 1 else None)
        if self.push == 1:
            servers.finish()
        if self.fetch > 1:
            replica.descend()
        if self.push > 1:
            self._accrue(replica, servers)
        return loss

    def _accrue(self, replica: Descending, servers: DirectServers) -> None:
        state, length = replica.keep(Unpushed), len(replica.params)
        # What is kept is left alone: should the push fail, this worker makes the step again.
        before = state.accrued
        accrued = replica.params.new_zeros(length + len(replica.used)) if before is None else before.clone()
        accrued[:length].add_(replica.grads)
        accrued[length:].add_(replica.used)
        if replica.steps % self.push == 0:
            servers.push_gradient(accrued[:length], accrued[length:])
        state.accrued = None if replica.steps % self.push == 0 else accrued

    def leave(self, replica: Descending, servers: DirectServers) -> None:
        state, length = replica.keep(Unpushed), len(replica.params)
        if state.accrued is not None:
            servers.push_gradient(state.accrued[:length], state.accrued[length:])
            state.accrued = None
