"""Pipeline: a model's layers in stages on different workers; microbatches follow each other through them.

GPipe (Huang et al. 2019), PipeDream's 1F1B (Narayanan et al. 2019), interleaved stages (Narayanan et al. 2021),
zero bubble (Qi et al. 2024). With p stages and m microbatches a worker is idle for (p − 1) ÷ (m + p − 1) of a step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.errors import UnknownName, UsageError
from manyhands.placement.mesh import Mesh, form
from manyhands.placement.pipeline.timetable import SCHEDULES
from manyhands.placement.placement import Placement

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from manyhands.placement.model_parallel import ModelParallelPart
    from manyhands.placement.pipeline.stage_plan import StageDivision
    from manyhands.placement.process_groups import ProcessGroups
    from manyhands.replica.part import Loss


@dataclass(frozen=True, kw_only=True)
class Pipeline(Placement):
    """Layers in stages on different workers (GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2019; Qi et al. 2024)."""

    stages: int = 2
    microbatches: int = 4
    schedule: str = "1f1b"
    chunks: int = 2  # stages of each worker where the schedule is interleaved
    split: tuple[str, ...] = ()  # the last layer of each stage but the last; where not given, measured

    def __post_init__(self) -> None:
        for name, value in (
            ("stages", self.stages),
            ("microbatches", self.microbatches),
            ("chunks", self.chunks),
        ):
            if value < 1:
                raise UsageError(f"{name}={value}: it must be at least 1")
        if self.schedule not in SCHEDULES:
            raise UnknownName("schedule", self.schedule, SCHEDULES)
        cuts = self.stages * self.depth - 1
        if self.split and len(self.split) != cuts:
            raise UsageError(
                f"split={'-'.join(self.split)} makes {len(self.split) + 1} stages, and {self.stages} "
                f"workers × {self.depth} "
                f"make {cuts + 1}; name {cuts} layers"
            )

    @property
    def depth(self) -> int:
        """Stages of each worker."""
        return self.chunks if self.schedule == "interleaved" else 1

    @property
    def by_batch(self) -> bool:
        return True

    def mesh(self, workers: int) -> Mesh:
        return form(workers, stages=self.stages)

    def divide(self, model: Any, loss: "Loss", groups: "ProcessGroups", example: Any) -> "StageDivision":
        """Where the model is cut, the same on all workers."""
        from manyhands.placement.pipeline.cutting import cut

        return cut(
            model,
            loss,
            groups,
            example,
            stages=self.stages * self.depth,
            names=self.split,
            micros=self.microbatches,
        )

    def place(
        self, model: Any, optimizer: "Optimizer", loss: "Loss", groups: "ProcessGroups", example: Any
    ) -> "ModelParallelPart":
        from manyhands.placement.pipeline.stages import Stages

        division = self.divide(model, loss, groups, example)
        return Stages(model, loss, groups, division, schedule=self.schedule, micros=self.microbatches)
