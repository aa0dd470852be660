"""Compute that takes a stated time: what a model costs is chosen, so that what agreeing costs can be seen.

Several workers on one machine get in each other's way when they really compute, and then a benchmark measures cores. A
paced worker sleeps instead. Its slowness is drawn per worker and step from a seed, so all contenders meet the same.
"""

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LAYERS = 8
FORWARD = 1 / 3  # of a step's time; a backward pass is about twice as much work


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long the compute of each step takes on each worker."""

    step_s: float = 0.0
    chance: float = 0.0
    """Of a slow step, for each worker and step."""
    times: float = 1.0
    """How much longer a slow step takes."""
    slow_worker: int | None = None
    """A worker whose steps are all slow."""
    seed: int = 0

    def seconds(self, rank: int, step: int) -> float:
        is_slow = rank == self.slow_worker or (
            self.chance > 0 and random.Random(f"{self.seed} {rank} {step}").random() < self.chance
        )
        return self.step_s * (self.times if is_slow else 1.0)


class Sleep(torch.autograd.Function):
    """Passes on what it is given, and sleeps on the way there and back."""

    @staticmethod
    def forward(context: object, value: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds  # type: ignore[attr-defined]
        time.sleep(seconds * FORWARD)
        return value.view_as(value)

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(context.seconds * (1 - FORWARD))  # type: ignore[attr-defined]
        return gradient, None


class Bulk(nn.Module):
    """Layers of so many bytes that cost nothing but the sleep: gradients to exchange, without a computation."""

    def __init__(self, size_bytes: int, layers: int = LAYERS) -> None:
        super().__init__()
        count = size_bytes // 4 // layers
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(count)) for _ in range(layers))
        self.step_s = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        value = inputs.mean()
        for layer in self.layers:
            value = Sleep.apply(_Touch.apply(value, layer), self.step_s / len(self.layers))
        return value


class _Touch(torch.autograd.Function):
    """A layer whose gradient is one everywhere, and no more work than writing that down."""

    @staticmethod
    def forward(context: object, value: Tensor, layer: Tensor) -> Tensor:
        context.length = len(layer)  # type: ignore[attr-defined]
        return value + layer[0]

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, torch.full((context.length,), float(gradient))  # type: ignore[attr-defined]
