"""The whole model on every worker."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.placement.placement import Placement

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from manyhands.placement.standing import Standing
    from manyhands.replica.part import Loss, Part


@dataclass(frozen=True, kw_only=True)
class Single(Placement):
    """Every replica is whole on its worker: data parallelism alone (Li et al. 2020)."""

    def place(
        self, model: Any, optimizer: "Optimizer", loss: "Loss", standing: "Standing", example: Any
    ) -> "Part":
        from manyhands.replica.part import Part

        return Part(model, loss)
