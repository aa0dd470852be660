"""Made-up images: each class has a pattern of its own, so that there is something to learn."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

SAMPLES = "PORTING_SAMPLES"  # how many images there are to train on; a quarter as many to test


class _Images(Dataset[Any]):
    shape: tuple[int, ...] = (28, 28)
    classes = 10

    def __init__(
        self,
        root: str | None = None,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        count = int(os.environ.get(SAMPLES, "256"))
        count = count if train else max(1, count // 4)
        drawn = torch.Generator().manual_seed(0 if train else 1)
        patterns = torch.randint(
            0, 128, (self.classes, *self.shape), generator=torch.Generator().manual_seed(2)
        )
        noise = torch.randint(0, 128, (count, *self.shape), generator=drawn)
        self.targets = torch.arange(count) % self.classes
        self.data = (patterns[self.targets] + noise).to(torch.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(np.asarray(self.data[index]))
        return (self.transform(image) if self.transform else image), int(self.targets[index])


class MNIST(_Images):
    pass


class CIFAR10(_Images):
    shape = (32, 32, 3)


class FakeData(_Images):
    """`image_size` is (channels, height, width)."""

    def __init__(
        self, image_size: tuple[int, int, int] = (3, 64, 64), transform: Callable[[Any], Any] | None = None
    ) -> None:
        channels, height, width = image_size
        self.shape = (height, width, channels)
        super().__init__(transform=transform)
