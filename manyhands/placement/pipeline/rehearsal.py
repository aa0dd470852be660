"""Before the first step: the stages one after the other in one process, against the model as it is."""

from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import UsageError
from manyhands.placement.pipeline.microbatches import copied
from manyhands.placement.pipeline.stage_graph import Received, StageGraph, forward
from manyhands.placement.pipeline.stage_plan import StageDivision, StagePlan
from manyhands.placement.pipeline.tracer import (
    plain_attributes,
    set_plain_attributes,
    unchanged,
    unchanged_outside,
)
from manyhands.replica.part import Loss
from manyhands.replica.returned import loss_in, number_in

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
COARSE = 5e-2  # of half precision


def rehearse(model: nn.Module, division: StageDivision, loss: Loss, batch: Any, workers: int) -> None:
    """Refuse a division whose stages do not give the loss and the gradients of the whole model on the example."""
    with unchanged(model):
        state = torch.get_rng_state()
        value = loss_in(loss(model, copied(batch)))
        with unchanged_outside(model, value):
            value.backward()  # type: ignore[no-untyped-call]
        alone = _take_gradients(model)
    with unchanged(model):
        torch.set_rng_state(state)
        plan = StagePlan(model, division)
        try:
            staged = _in_stages(plan, loss, batch, workers)
        except UsageError:
            raise
        except Exception as error:  # whatever the user's code does with a part of the model
            raise _differs(f"{type(error).__name__}, {' '.join(str(error).split())[:200]}") from error
        finally:
            plan.remove()
        found = _take_gradients(model)
    staged, value = staged.detach(), value.detach()
    if not alike(staged, value):
        raise _differs(f"the loss is {number_in(staged):.6g} instead of {number_in(value):.6g}")
    for name, one in alone.items():
        other = found.get(name)
        if (one is None) != (other is None) or (
            one is not None and other is not None and not alike(other, one)
        ):
            raise _differs(f"{name} has another gradient")


def _in_stages(plan: StagePlan, loss: Loss, batch: Any, workers: int) -> Tensor:
    """What modules count is with each worker, which may have several stages."""
    graphs: list[StageGraph] = []
    counted = [plain_attributes(plan.model)] * workers
    received: Received | None = None
    for stage in range(plan.stages):
        set_plain_attributes(counted[stage % workers])
        graphs.append(forward(plan, stage, received, None, loss, batch))
        counted[stage % workers] = plain_attributes(plan.model)
        plan.needs.clear()
        if sent := graphs[-1].sent:
            values = [(value.detach().clone(), value.requires_grad) for _, value in sent.values]
            received = Received(sent.digest, [number for number, _ in sent.values], values)
    value = loss_in(graphs[-1].result)
    with unchanged_outside(plan.model, value):
        value.backward()  # type: ignore[no-untyped-call]
    for before, graph in zip(graphs[-2::-1], graphs[:0:-1], strict=True):
        if before.outputs:
            torch.autograd.backward(before.outputs, graph.gradients())
    return value


def _take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: param.grad for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = None
    return found


def alike(one: Tensor, other: Tensor) -> bool:
    """To rounding: where a value is used by two stages, its gradients are added up in another order."""
    if one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    tolerance = TOLERANCES.get(one.dtype, COARSE)
    size = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * size + 1e-12, equal_nan=True)


def _differs(how: str) -> UsageError:
    return UsageError(
        f"in stages the model does not compute on the first batch what it computes whole: {how}; a pipeline cannot "
        "cut it there: name other layers, --placement pipeline:split=LAYER, or choose another placement"
    )
