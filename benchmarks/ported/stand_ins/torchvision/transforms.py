"""What the scripts do with an image before they train on it."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

SAME = "PORTING_SAME"  # random transforms leave an image as it is, so that two runs can be compared


def _draw(limit: int) -> int:
    return 0 if os.environ.get(SAME) else int(torch.randint(limit, ()))


class Compose:
    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Any:
        for step in self.steps:
            image = step(image)
        return image


class ToTensor:
    def __call__(self, image: Any) -> Tensor:
        values = torch.as_tensor(np.array(image)).to(torch.get_default_dtype()) / 255
        return values[None] if values.ndim == 2 else values.permute(2, 0, 1).contiguous()


class Normalize:
    """Statistics for three channels fit an image of one: the first are taken."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = mean, std

    def __call__(self, image: Tensor) -> Tensor:
        channels = len(image)
        mean, std = (torch.tensor(each[:channels])[:, None, None] for each in (self.mean, self.std))
        return (image - mean) / std


class Resize:
    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = (size, size) if isinstance(size, int) else size

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.resize((self.size[1], self.size[0]))


class Pad:
    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.expand(image, self.padding)


class RandomCrop:
    def __init__(self, size: int, padding: int = 0) -> None:
        self.size, self.padding = size, padding

    def __call__(self, image: Image.Image) -> Image.Image:
        image = ImageOps.expand(image, self.padding)
        left, top = _draw(image.width - self.size + 1), _draw(image.height - self.size + 1)
        return image.crop((left, top, left + self.size, top + self.size))


class RandomHorizontalFlip:
    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.mirror(image) if _draw(2) else image
