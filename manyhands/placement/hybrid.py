"""Hybrid: data × pipeline × tensor on one mesh.

Stages of layers, the layers of each stage divided among workers, and as many replicas as there are workers for
(Narayanan et al. 2021; the hybrid partition of SINGA, Ooi et al. 2015).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.placement.mesh import Mesh, form
from manyhands.placement.pipeline.pipeline import Pipeline
from manyhands.placement.placement import Placement
from manyhands.placement.tensor.tensor import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from manyhands.placement.model_parallel import ModelParallelPart
    from manyhands.placement.process_groups import ProcessGroups
    from manyhands.replica.part import Loss


@dataclass(frozen=True, kw_only=True)
class Hybrid(Placement):
    """Data × pipeline × tensor on one mesh (Narayanan et al. 2021; SINGA, Ooi et al. 2015)."""

    pipeline: int = 2  # stages
    tensor: int = 2  # ways
    microbatches: int = 4
    schedule: str = "1f1b"
    chunks: int = 2
    split: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._stages()
        self._ways()

    def _stages(self) -> Pipeline:
        return Pipeline(
            stages=self.pipeline,
            microbatches=self.microbatches,
            schedule=self.schedule,
            chunks=self.chunks,
            split=self.split,
        )

    def _ways(self) -> Tensor:
        return Tensor(ways=self.tensor, whole=self.whole, columns=self.columns, rows=self.rows)

    @property
    def by_batch(self) -> bool:
        return self.pipeline > 1

    def mesh(self, workers: int) -> Mesh:
        return form(workers, stages=self.pipeline, ways=self.tensor)

    def place(
        self, model: Any, optimizer: "Optimizer", loss: "Loss", groups: "ProcessGroups", example: Any
    ) -> "ModelParallelPart":
        if self.tensor == 1:
            return self._stages().place(model, optimizer, loss, groups, example)
        if self.pipeline == 1:
            return self._ways().place(model, optimizer, loss, groups, example)
        from manyhands.placement.model_parallel import require_element_wise
        from manyhands.placement.pipeline.stages import Stages
        from manyhands.placement.tensor.slices import slice_model

        require_element_wise(optimizer, "hybrid")
        stages = self._stages()
        division = stages.divide(model, loss, groups, example)
        # What stages lend each other stays whole.
        lent = {id(tensor) for tensor in division.lent_tensors(model)}
        modules = [
            module
            for module in Stages.modules(model, division, groups)
            if not lent & {id(param) for param in module.parameters()}
        ]
        given = {"whole": self.whole, "columns": self.columns, "rows": self.rows}
        sliced = slice_model(model, groups, modules, given)
        return Stages(
            model, loss, groups, division, schedule=self.schedule, micros=self.microbatches, sliced=sliced
        )
