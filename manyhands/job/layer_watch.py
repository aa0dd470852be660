"""Weights and gradients of every layer, now and then: norms and histograms, for those who look on.

Worker 0 makes one more forward and backward pass on the batch of its last step, by plain autograd and outside of the
session, and throws the gradients away. It leaves no trace: buffers are copies, and random numbers are put back, so the
run's parameters are the same to the bit as without it. While it lasts, workers that step together wait: with one look
every N steps that is about 1 ÷ N of the time, and as much again for the histograms of large layers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyhands import telemetry
from manyhands.engine import random_state

BINS = 30

Loss = Callable[[Any, Any], Tensor]


class LayerWatch:
    """Looks at the layers of a model after every so many steps."""

    def __init__(self, model: nn.Module, loss: Loss, every: int) -> None:
        self._model, self._loss, self._every = model, loss, every

    def see(self, step: int, epoch: int, batch: Any) -> None:
        """A step is made, of which this was the last batch."""
        if step % self._every == 0:
            with telemetry.timed("watch"):
                layers = self._layers(batch)
            telemetry.event("layers", step=step, epoch=epoch, layers=layers)

    def _layers(self, batch: Any) -> list[dict[str, Any]]:
        named = [(name, param) for name, param in self._model.named_parameters() if param.requires_grad]
        numbers = random_state.capture()
        try:
            gradients = self._gradients(batch, [param for _, param in named])
        finally:
            random_state.restore(numbers)
        return [
            {"name": name, **_described("weight", param.detach()), **_described("gradient", gradient)}
            for (name, param), gradient in zip(named, gradients, strict=True)
        ]

    def _gradients(self, batch: Any, params: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
        """Of the loss of this batch alone; the running statistics that the pass writes are copies."""
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}

        def model(*inputs: Any) -> Any:
            return functional_call(self._model, buffers, inputs)

        value = self._loss(model, batch)
        return torch.autograd.grad(value, params, allow_unused=True)


def _described(what: str, values: Tensor | None) -> dict[str, Any]:
    """Norm, range and how many values are in each of `BINS` parts of the range; nothing of what is not there."""
    if values is None:
        return {}
    flat = (values.to_dense() if values.is_sparse else values).flatten().float()
    norm = float(flat.norm())
    if not math.isfinite(norm) or not len(flat):
        return {f"{what}_norm": norm}
    low, high = (float(end) for end in torch.aminmax(flat))
    counts = torch.histc(flat, BINS, low, high) if high > low else torch.tensor([float(len(flat))])
    return {
        f"{what}_norm": norm,
        f"{what}_range": [low, high],
        f"{what}_counts": [int(count) for count in counts],
    }
