"""What every placement is: a frozen dataclass that says how one replica is laid over workers.

Placements import no torch at run time: the launcher reads their settings and must start fast.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.placement.mesh import Mesh, form
from manyhands.strategies.interface import Asked

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from manyhands.placement.model_parallel import ModelParallelPart
    from manyhands.placement.process_groups import ProcessGroups
    from manyhands.replica.part import Loss


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How one replica is laid over workers.

    The dataclass is at once the configuration, the command-line grammar and the record in reports.
    """

    @property
    def by_batch(self) -> bool:
        """Whether the model is divided by what a batch shows."""
        return False

    def mesh(self, workers: int) -> Mesh:
        """The shape that so many workers form; refuses those that are left over."""
        return form(workers)

    def check(self, asked: Asked) -> None:
        """Refuse, before any process starts, what cannot run as asked."""

    def place(
        self, model: Any, optimizer: "Optimizer", loss: "Loss", groups: "ProcessGroups", example: Any
    ) -> "ModelParallelPart":
        """This worker's part of the model, which has worker 0's values; what others have may be given up."""
        raise NotImplementedError
