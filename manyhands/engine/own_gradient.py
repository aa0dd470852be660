"""What a worker's own backward passes give, before it is put together with that of the others."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.engine.engine import Engine
from manyhands.engine.handshake import Handshake
from manyhands.engine.joint_steps import joint_passes
from manyhands.engine.step_input import StepInput
from manyhands.replica.part import Part
from manyhands.replica.share import Share


@dataclass(frozen=True)
class OwnGradient:
    """What this worker's passes have given: the gradient of the mean over its samples."""

    gradients: Sequence[Tensor | None]
    loss: float
    """Summed over the samples."""
    is_weighted: bool = False
    """Whether it is this worker's part of the gradient of the mean over the samples of all."""


def is_loss_itself(given: Sequence[Any]) -> bool:
    """Whether a script gives a loss that it has computed, in place of batches."""
    return len(given) == 1 and isinstance(given[0], Tensor) and given[0].grad_fn is not None


def params_of(engine: Engine) -> Sequence[nn.Parameter]:
    return engine.replica.parameters


def computed(
    engine: Engine, work: StepInput, own: OwnGradient | None, handshake: Handshake | None, scaler: Any
) -> OwnGradient:
    """This worker's gradient, if it has it not yet; what it made with workers who are gone it makes again."""
    is_loss = bool(work.parts) and is_loss_itself([work.parts[0][0]])
    with joint_passes(engine, handshake, 0 if is_loss else len(work.parts)) as are_joint:
        if are_joint and handshake is not None and work.parts and not is_loss:
            return _passes(engine, work, scaler, handshake.total())
        return own or _passes(engine, work, scaler)


def _passes(engine: Engine, work: StepInput, scaler: Any, total: float | None = None) -> OwnGradient:
    """Run the passes; the gradients that were there before are there again afterwards. With a `total`, samples are
    weighted by it."""
    params, training = params_of(engine), engine.training
    before = [param.grad for param in params]
    for param in params:
        param.grad = None
    if engine.writes.is_on and engine.progress.is_early:
        engine.replica.part.watch = engine.writes
    is_loss = work.parts and is_loss_itself([work.parts[0][0]])
    part = engine.replica.part
    if is_loss:
        part, whole = Part(training.model, lambda _, loss: loss), part
        look, whole.first_loss = whole.first_loss, None
        part.first_loss = look and (lambda returned, _: look(returned, work.counts))
    scale = (
        1.0 if scaler is None else float(scaler.scale(torch.ones((), device=engine.replica.params.device)))
    )
    share = Share(
        parts=work.parts,
        samples=work.samples,
        total=lambda: (total or work.samples) / scale,
        results=work.results,
    )
    try:
        with engine.siblings.untouched(engine):
            loss, _ = part.backward(share, lambda is_last: nullcontext())
        return OwnGradient([param.grad for param in params], loss, is_weighted=total is not None)
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
