"""Sharded: parameters, gradients and optimizer state spread over workers, each of which computes on samples of its own.

ZeRO (Rajbhandari et al. 2020), PyTorch's fully sharded data parallel (Zhao et al. 2023). With n workers each holds
1/n of everything that is kept between steps; a layer is whole on a worker only while it computes.
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
class Sharded(Placement):
    """Parameters, gradients and optimizer state spread over workers (ZeRO, Rajbhandari et al. 2020)."""

    shards: int | None = None  # workers of one replica; where not given, all

    def __post_init__(self) -> None:
        if self.shards is not None and self.shards < 1:
            raise UsageError(f"shards={self.shards}: it must be at least 1")

    def mesh(self, workers: int) -> Mesh:
        return form(workers, shards=self.shards or workers)

    def place(
        self, model: Any, optimizer: "Optimizer", loss: "Loss", groups: "ProcessGroups", example: Any
    ) -> "ModelParallelPart":
        from manyhands.placement.model_parallel import require_element_wise
        from manyhands.placement.sharded.shards import Shards

        require_element_wise(optimizer, "sharded")
        return Shards(model, optimizer, loss, groups)
