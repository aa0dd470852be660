"""Blockwise model-update filtering: the average of a block's models is a step, and steps have momentum.

Chen & Huo 2016; CNTK's `BlockMomentumSGD`. The average of n workers has moved no further than one of them; momentum
over blocks makes up for it. With w the model that a block of `period` steps began with and w̄ the average at its end,

    Δ ← momentum · Δ + lr · (w̄ − w),    w ← w + Δ,    or, with Nesterov,    w ← w + lr · (w̄ − w) + momentum · Δ.

The momentum of the workers' own SGD begins anew with every block, as in CNTK: both together would overshoot.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.extras import WithMomentum
from manyhands.strategies.interface import CommView, Periodic
from manyhands.strategies.refusals import within

if TYPE_CHECKING:
    from torch import Tensor

MOMENTUM = "momentum_buffer"  # as torch.optim.SGD calls it


@dataclass
class BlockStart:
    """What every worker keeps: w and Δ."""

    block_start: "Tensor"
    block_delta: "Tensor"


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

    def begin(self, replica: WithMomentum) -> BlockStart:
        params = replica.params
        return replica.keep(
            lambda: BlockStart(block_start=params.clone(), block_delta=params.new_zeros(len(params)))
        )

    def meet(self, replica: WithMomentum, comm: CommView) -> None:
        momentum = 1 - 1 / comm.size if self.momentum is None else self.momentum
        block, params = self.begin(replica), replica.params
        start, delta = block.block_start, block.block_delta
        comm.mean_(params)
        step = params.sub_(start).mul_(self.lr)
        delta.mul_(momentum).add_(step)
        start.add_(step.add_(delta, alpha=momentum) if self.nesterov else delta)
        params.copy_(start)
        if MOMENTUM in replica.updates.vectors:
            replica.updates.vectors[MOMENTUM].zero_()
