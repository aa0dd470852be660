"""The training jobs, the same for every contender: model, data, optimizer, and what we want to reach."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from manyhands import models

CLASSES = 10
BATCHES = 4  # different ones, so that no step sees what the last one left in the cache


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and the shape of one sample; targets are ratios of ours to a contender's samples per second."""

    title: str
    model: str
    shape: tuple[int, ...]
    targets: dict[str, float] = field(default_factory=dict)


JOBS = {
    "alexnet": Job(
        title="AlexNet, 3×64×64",
        model="alexnet",
        shape=(3, 64, 64),
        targets={"ddp": 1.5, "unconnected": 1.0, "two-threads": 1.05, "ours-mortal": 0.97},
    ),
    "vgg16": Job(
        title="VGG16 (13 convolutions + one linear), 3×32×32",
        model="vgg16:head=linear",
        shape=(3, 32, 32),
        targets={"ddp": 1.1, "unconnected": 0.97, "two-threads": 1.03, "ours-mortal": 0.97},
    ),
    "mlp": Job(
        title="MLP 3072-4096-4096-10",
        model="mlp:hidden=4096-4096",
        shape=(3072,),
        targets={"ddp": 1.8, "unconnected": 1.0, "two-threads": 1.2, "ours-mortal": 0.94},
    ),
    "resnet50": Job(
        title="ResNet50, 3×32×32",
        model="resnet50",
        shape=(3, 32, 32),
        targets={"ddp": 1.08, "unconnected": 0.97, "two-threads": 1.03, "ours-mortal": 0.97},
    ),
    "small-mlp": Job(title="MLP 784-256-10", model="mlp:hidden=256", shape=(784,)),
}

# For adapters.py: one whose step is all computing, one whose step is all parameters, and one that is hardly there.
ADAPTED = {
    "resnet20": Job(title="ResNet20, 3×32×32", model="resnet20", shape=(3, 32, 32)),
    "mlp": Job(title="MLP 3072-2048-2048-10", model="mlp:hidden=2048-2048", shape=(3072,)),
    "small-mlp": JOBS["small-mlp"],
}

# For extremes.py: many parameters that are hardly there, and a few that are most of the memory.
EXTREMES = {
    "many-small": Job(
        title="5,000 parameters: MLP of 2,500 layers of width 4",
        model=f"mlp:hidden={'-'.join(['4'] * 2499)}",
        shape=(64,),
    ),
    "large": Job(title="1.5 GB: MLP 3072-17920-17920-10", model="mlp:hidden=17920-17920", shape=(3072,)),
    "small-mlp": JOBS["small-mlp"],
}
ALL = {**JOBS, **EXTREMES}


def build(job: Job) -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = models.build(job.model, job.shape, CLASSES)
    return model, SGD(model.parameters(), lr=0.001, momentum=0.9)


def make_batches(job: Job, batch_size: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Normalised random samples of this rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [
        (
            torch.randn(batch_size, *job.shape, generator=generator),
            torch.randint(CLASSES, (batch_size,), generator=generator),
        )
        for _ in range(BATCHES)
    ]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)
