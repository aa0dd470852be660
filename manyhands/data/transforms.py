"""What is done to pictures on their way into a batch: whole batches [N, C, H, W], seeded per sample."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.data.randomness import Randomness


class Transform(Protocol):
    def __call__(self, images: Tensor, randomness: Randomness) -> Tensor: ...


# Which random numbers a transform draws; two transforms with one stream would move together.
_FLIP, _CROP_ROW, _CROP_COLUMN = range(3)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Stored values 0 … `full` to numbers in [0, 1]."""

    full: int = 255

    def __call__(self, images: Tensor, randomness: Randomness) -> Tensor:
        return images.to(torch.float32).div_(self.full)


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Subtract the mean of each channel and divide by its deviation."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, images: Tensor, randomness: Randomness) -> Tensor:
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        deviation = torch.tensor(self.deviation).view(-1, 1, 1)
        return (images - mean).div_(deviation)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Mirror half of the pictures left to right."""

    def __call__(self, images: Tensor, randomness: Randomness) -> Tensor:
        flipped = randomness.below(2, stream=_FLIP).bool()
        return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


@dataclass(frozen=True, kw_only=True)
class Crop:
    """Move each picture by up to `padding` pixels each way; zeros come in at the edges."""

    padding: int = 4

    def __call__(self, images: Tensor, randomness: Randomness) -> Tensor:
        height, width = images.shape[2:]
        padded = functional.pad(images, [self.padding] * 4)
        places = 2 * self.padding + 1
        rows = randomness.below(places, stream=_CROP_ROW)
        columns = randomness.below(places, stream=_CROP_COLUMN)
        return torch.stack(
            [
                picture[:, row : row + height, column : column + width]
                for picture, row, column in zip(padded, rows.tolist(), columns.tolist(), strict=True)
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Scale the shorter side to `size` and cut the middle square out."""

    size: int

    def __call__(self, images: Tensor, randomness: Randomness) -> Tensor:
        height, width = images.shape[-2:]
        if (height, width) == (self.size, self.size):
            return images
        shorter = min(height, width)
        scaled = [round(side * self.size / shorter) for side in (height, width)]
        images = functional.interpolate(images, size=scaled, mode="bilinear", antialias=True)
        top, left = (scaled[0] - self.size) // 2, (scaled[1] - self.size) // 2
        return images[:, :, top : top + self.size, left : left + self.size].contiguous()
