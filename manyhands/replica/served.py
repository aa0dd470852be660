"""A replica whose parameters servers update."""

from torch.optim import Optimizer

from manyhands.replica.flat_model import FlatModel
from manyhands.replica.gradients.factors import large_weights
from manyhands.replica.gradients.in_advance import GradientsInAdvance
from manyhands.replica.gradients.tables import Tables
from manyhands.replica.optimizer.updates import RemotePath, StepGate, Updates
from manyhands.replica.part import Part
from manyhands.replica.replica import Replica
from manyhands.replica.server_memory import ServerMemory


def served_replica(part: Part, optimizer: Optimizer, memory: ServerMemory, *, lanes: int) -> Replica:
    """Gradients are made where servers read them; the first worker of a team hands them on."""
    flat = FlatModel(part, optimizer, memory, memory.layout)
    is_alone = memory.team.size == 1
    gradients = GradientsInAdvance(
        flat,
        [0] * len(flat.layout.spans),
        memory.team,
        # Where each worker's gradients go to servers as they are, rows of tables need not become whole.
        tables=Tables(flat.layout, flat.total) if is_alone else None,
        made_in_place=large_weights(flat.model, flat.parameters) if is_alone and not part.spread else (),
    )
    updates = Updates(optimizer, flat.layout, flat.params, allocate=None)
    return Replica(
        flat, gradients, RemotePath(updates, gradients, StepGate(gradients, memory.team)), lanes=lanes
    )
