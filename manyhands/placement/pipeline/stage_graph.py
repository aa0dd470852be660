"""What the forward pass of one microbatch through one stage leaves behind for its backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manyhands.placement.pipeline.distant import tensors_of
from manyhands.placement.pipeline.microbatches import copied
from manyhands.placement.pipeline.stage_pass import Crossing, StagePass
from manyhands.placement.pipeline.stage_plan import StagePlan
from manyhands.replica.part import Loss


class Entry(torch.autograd.Function):
    """Lets values in from another stage: they need gradients, which are left in `box`, and may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Any], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.box = box
        ctx.mark_dirty(*values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.box[:] = gradients
        return (None, None, *(None for _ in gradients))


def enter(values: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """The values as the beginning of a graph, and where their gradients will be found."""
    box: list[Any] = []
    if not values:
        return [], box
    anchor = torch.zeros(0, requires_grad=True)
    return list(Entry.apply(anchor, box, *values)), box  # type: ignore[no-untyped-call]


@dataclass
class Received:
    """What the stage before has sent: which of the values need gradients stands beside each."""

    digest: int
    numbers: Sequence[int]
    values: Sequence[tuple[Tensor, bool]]


@dataclass
class StageGraph:
    """One microbatch in one stage, between its passes."""

    result: Any
    """What the loss has returned, on the last stage."""
    sent: Crossing | None
    """What the next stage needs."""
    box: list[Any]
    likes: list[Tensor]
    """By value that wants a gradient: its shape and type."""

    @property
    def outputs(self) -> list[Tensor]:
        """The values whose gradients come from the next stage."""
        return [value for _, value in self.sent.values if value.requires_grad] if self.sent else []

    def gradients(self) -> list[Tensor]:
        """After the backward pass: what the stage before waits for."""
        found = self.box or [None] * len(self.likes)
        return [
            torch.zeros(like.shape, dtype=like.dtype) if gradient is None else gradient
            for gradient, like in zip(found, self.likes, strict=True)
        ]


def forward(
    plan: StagePlan, stage: int, received: Received | None, kind: Any, loss: Loss, batch: Any
) -> StageGraph:
    """The pass of a stage; `kind` says which passes run alike, so that what the first one finds out holds for all."""
    incoming: Crossing | None = None
    box: list[Any] = []
    likes: list[Tensor] = []
    if received:
        wanted = [value for value, needs in received.values if needs and torch.is_grad_enabled()]
        likes = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in wanted]
        entered, box = enter(wanted)
        gates = iter(entered)
        values = [
            (number, next(gates) if needs and wanted else value)
            for number, (value, needs) in zip(received.numbers, received.values, strict=True)
        ]
        incoming = Crossing(received.digest, values)
        del entered, gates, values, wanted  # the code that runs now is to be their only holder
        received = None
    needs = plan.needs.get((stage, kind))
    given = copied(batch) if needs is None or needs.writes else batch
    versions = [tensor._version for tensor in tensors_of(given)]
    walk = StagePass(plan, stage, incoming=incoming, needs=needs)
    result = walk.run(lambda: loss(plan.model, given))
    if walk.needs is not None and walk.needs is not needs:
        writes = versions != [tensor._version for tensor in tensors_of(given)]
        plan.learn((stage, kind), replace(walk.needs, writes=writes))
    return StageGraph(result, walk.outgoing, box, likes)
