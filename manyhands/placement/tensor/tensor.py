"""Tensor: the features of each layer divided among workers, which compute on the same samples.

Krizhevsky 2014, Megatron-LM (Shoeybi et al. 2019); the feature partition of SINGA (Ooi et al. 2015).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.errors import UsageError
from manyhands.placement.mesh import Mesh, form
from manyhands.placement.placement import Placement

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from manyhands.placement.model_parallel import ModelParallelPart
    from manyhands.placement.process_groups import ProcessGroups
    from manyhands.replica.part import Loss


@dataclass(frozen=True, kw_only=True)
class Tensor(Placement):
    """Features of each layer divided among workers (Megatron-LM, Shoeybi et al. 2019; SINGA, Ooi et al. 2015)."""

    ways: int = 2
    whole: tuple[str, ...] = ()  # layers that stay whole on every worker
    columns: tuple[str, ...] = ()  # layers divided by what they give
    rows: tuple[str, ...] = ()  # linear layers divided by what they take

    def __post_init__(self) -> None:
        if self.ways < 1:
            raise UsageError(f"ways={self.ways}: it must be at least 1")

    def mesh(self, workers: int) -> Mesh:
        return form(workers, ways=self.ways)

    def place(
        self, model: Any, optimizer: "Optimizer", loss: "Loss", groups: "ProcessGroups", example: Any
    ) -> "ModelParallelPart":
        from manyhands.placement.model_parallel import require_element_wise
        from manyhands.placement.tensor.slices import Slices, slice_model

        require_element_wise(optimizer, "tensor")
        given = {"whole": self.whole, "columns": self.columns, "rows": self.rows}
        sliced = slice_model(model, groups, model.modules(), given)
        return Slices(model, loss, groups, sliced)
