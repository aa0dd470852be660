"""Made-up samples that can be learned: a smooth pattern for each class, under noise.

A sample is computed from the seed and its number, so every worker and every host sees the same one and
nothing is stored but the patterns and one strip of noise.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.data.pictures import pictures
from manyhands.data.randomness import draw
from manyhands.data.request import Request
from manyhands.data.sets import Data
from manyhands.errors import UsageError

_LABEL, _OFFSET = range(2)
_STRIP = 1 << 16
_COARSE = 4
_TEST_SHARE = 5
_FORM = "synthetic:3x32x32:10"


@dataclass(frozen=True, kw_only=True)
class SyntheticSettings:
    samples: int = 4096
    """To train on; a fifth as many more to test on."""
    noise: float = 1.0
    """Deviation of the noise; that of the patterns is 1."""


@dataclass(frozen=True, kw_only=True)
class SyntheticStore:
    """Sample i is the pattern of its class plus a window of the strip of noise, both chosen by hashing i."""

    patterns: Tensor
    strip: Tensor
    seed: int
    first: int
    samples: int

    def __len__(self) -> int:
        return self.samples

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        numbers = indices + self.first
        labels = draw(seed=self.seed, epoch=0, stream=_LABEL, indices=numbers) % len(self.patterns)
        offsets = draw(seed=self.seed, epoch=0, stream=_OFFSET, indices=numbers) % _STRIP
        windows = self.strip.unfold(0, self.patterns[0].numel(), 1)
        noise = windows[offsets].view(len(indices), *self.patterns.shape[1:])
        return noise.add_(self.patterns[labels]), labels


def load(request: Request, settings: SyntheticSettings) -> Data:
    shape, classes = _parsed(request)
    if settings.samples < 1:
        raise UsageError(f"--data {request.text}: samples must be at least 1")
    generator = torch.Generator().manual_seed(request.seed)
    patterns = _patterns(shape, classes, generator)
    strip = settings.noise * torch.randn(_STRIP + prod(shape), generator=generator)

    def part(first: int, samples: int) -> SyntheticStore:
        return SyntheticStore(patterns=patterns, strip=strip, seed=request.seed, first=first, samples=samples)

    return pictures(
        request,
        train=part(0, settings.samples),
        test=part(settings.samples, max(1, settings.samples // _TEST_SHARE)),
        shape=shape,
        classes=classes,
    )


def _patterns(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Tensor:
    if len(shape) != 3:
        return torch.randn((classes, *shape), generator=generator)
    # Coarse shapes survive the pooling of convolutional networks; white noise would not.
    coarse = torch.randn((classes, shape[0], _COARSE, _COARSE), generator=generator)
    smooth = functional.interpolate(coarse, size=shape[1:], mode="bicubic")
    return smooth / smooth.std()


def _parsed(request: Request) -> tuple[tuple[int, ...], int]:
    try:
        text, count = request.pieces
        shape, classes = tuple(int(side) for side in text.split("x")), int(count)
    except ValueError:
        raise UsageError(
            f"--data {request.text}: expected a shape and a number of classes, as in {_FORM}"
        ) from None
    if min(shape) < 1 or classes < 2:
        raise UsageError(
            f"--data {request.text}: expected sides of at least 1 and at least 2 classes, as in {_FORM}"
        )
    return shape, classes
