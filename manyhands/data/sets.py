"""What a data set is: samples that come out in whole batches, and the pair of parts that a run trains on.

A *store* knows where samples are and how to read some of them; it keeps them small (bytes, files, a seed).
A `StoredSet` puts transforms behind a store and is an ordinary torch `Dataset` with one more method, `batch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from manyhands.data.randomness import Randomness
from manyhands.data.transforms import Transform


class Samples(Protocol):
    """Anything with a length and samples by number, as every map-style torch `Dataset` is."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Store(Protocol):
    """Where samples are kept, in whatever form is small."""

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and targets of these samples, stacked, as they are stored."""
        ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """A train part and a test part, and what a model must know about them."""

    name: str
    train: Samples
    test: Samples
    shape: tuple[int, ...]
    """Of one sample, without the batch."""
    classes: int
    """How many classes there are, or tokens in the vocabulary."""
    task: str
    """`classify` or `next-token`."""
    note: str = ""
    """What the source decided by itself, in one line for the user."""
    class_names: tuple[str, ...] = ()
    """What a person calls the classes, where the source knows."""


class StoredSet(Dataset[tuple[Tensor, Tensor]]):
    """A store and what happens to its samples on the way out."""

    def __init__(self, store: Store, transforms: Sequence[Transform] = (), *, seed: int = 0) -> None:
        self.store = store
        self.transforms = tuple(transforms)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Without this check a plain `for sample in dataset` would never end.
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, targets = self.batch(torch.tensor([index % len(self)]), epoch=0)
        return inputs[0], targets[0]

    def batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """These samples at once, transformed as this epoch transforms them."""
        inputs, targets = self.store.read(indices)
        randomness = Randomness(seed=self.seed, epoch=epoch, indices=indices)
        for transform in self.transforms:
            inputs = transform(inputs, randomness)
        return inputs, targets


@dataclass(frozen=True, kw_only=True)
class ArrayStore:
    """Samples in memory, or mapped from a file, as they are stored there (pictures: one byte per value)."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self.targets[indices].long()


def hold_out(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sample numbers to train on and `count` to keep for testing, each class in proportion."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    position = torch.empty(len(labels), dtype=torch.float64)
    for label in torch.unique(labels):
        members = shuffled[labels[shuffled] == label]
        position[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    order = torch.argsort(position, stable=True)
    return order[count:].sort().values, order[:count].sort().values
