"""DiLoCo: many inner steps alone, then one outer step of Nesterov momentum on what all have moved.

Douillard et al. 2023. With θ the parameters that the round began with and θ_i those that worker i ended with,

    Δ = θ − Σ θ_i / n,    v ← momentum · v + Δ,    θ ← θ − lr · (Δ + momentum · v).

The inner optimizer is the user's (AdamW in the paper) and its state stays with the worker.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.interface import CommView, Periodic, ReplicaView
from manyhands.strategies.refusals import within

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Outer:
    """What every worker keeps."""

    theta: "Tensor"
    velocity: "Tensor"


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Periodic):
    """Many steps alone, then an outer Nesterov step on the mean of what all have moved (Douillard et al. 2023)."""

    period: int = 32
    lr: float = 0.7
    momentum: float = 0.6  # the paper's 0.9 needs many rounds

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, 10, lr=self.lr)
        within(0, 1, momentum=self.momentum)

    def begin(self, replica: ReplicaView) -> Outer:
        params = replica.params
        return replica.keep(lambda: Outer(theta=params.clone(), velocity=params.new_zeros(len(params))))

    def meet(self, replica: ReplicaView, comm: CommView) -> None:
        outer, params = self.begin(replica), replica.params
        comm.mean_(params)
        delta = params.neg_().add_(outer.theta)
        outer.velocity.mul_(self.momentum).add_(delta)
        outer.theta.sub_(delta.add_(outer.velocity, alpha=self.momentum), alpha=self.lr)
        params.copy_(outer.theta)
