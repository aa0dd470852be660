"""A model and data of one's own, named on the command line; both are ordinary functions in an ordinary module.

cd examples
manyhands train --model own_model:build --data own_model:make --optimizer adam:lr=0.01
"""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

ARMS = 3


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model for samples of this shape; manyhands finds shape and classes in the data."""
    return nn.Sequential(
        nn.Linear(math.prod(shape), 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, classes)
    )


def make() -> tuple[TensorDataset, TensorDataset]:
    """Points on the arms of a spiral, and which arm each is on; any torch Dataset of pairs will do."""
    return spiral(2000, seed=0), spiral(500, seed=1)


def spiral(points: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(ARMS, (points,), generator=generator)
    radius = torch.rand(points, generator=generator)
    angle = 2 * math.pi * (arm / ARMS + radius) + 0.1 * torch.randn(points, generator=generator)
    place = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(place, arm)
