"""Blockwise model-update filtering: the average of a block's models is a step, and steps have momentum.

Chen & Huo 2016; CNTK's `BlockMomentumSGD`. The average of n workers has moved no further than one of them; momentum
over blocks makes up for it. With w the model that a block of `period` steps began with and w̄ the average at its end,

    Δ ← momentum · Δ + lr · (w̄ − w),    w ← w + Δ,    or, with Nesterov,    w ← w + lr · (w̄ − w) + momentum · Δ.

The momentum of the workers' own SGD begins anew with every block, as in CNTK: both together would overshoot.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.periodic import Periodic
from manyhands.strategies.refusals import within

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica

MOMENTUM = "momentum_buffer"  # as torch.optim.SGD calls it


@dataclass(frozen=True, kw_only=True)
class BlockMomentum(Periodic):
    """Average after every block of `period` steps, with momentum over blocks (Chen & Huo 2016; CNTK)."""

    lr: float = 1.0
    momentum: float | None = None  # 1 − 1 / workers where not given
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, 10, lr=self.lr)
        within(0, 1, momentum=self.momentum)

    def begin(self, replica: "Replica") -> None:
        replica.keep("block start", replica.params)

    def meet(self, replica: "Replica", comm: "Comm") -> None:
        momentum = 1 - 1 / comm.size if self.momentum is None else self.momentum
        start, delta, params = replica.keep("block start"), replica.keep("block delta"), replica.params
        comm.mean_(params)
        step = params.sub_(start).mul_(self.lr)
        delta.mul_(momentum).add_(step)
        start.add_(step.add_(delta, alpha=momentum) if self.nesterov else delta)
        params.copy_(start)
        if MOMENTUM in replica.updates.vectors:
            replica.updates.vectors[MOMENTUM].zero_()
