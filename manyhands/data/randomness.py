"""Random numbers that belong to a sample, not to the worker that draws them.

A counter-based generator: the number is a hash of (seed, epoch, sample, stream). Nothing is carried from one
draw to the next, so a sample looks the same in any batch, in any order, on any number of workers.
The hash is that of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    # int64 shifts copy the sign bit; the hash needs zeros there.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(counter: Tensor) -> Tensor:
    """The splitmix64 hash of each int64, with the wrap-around of 64-bit words."""
    value = counter + _signed(_GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def draw(*, seed: int, epoch: int, stream: int, indices: Tensor) -> Tensor:
    """64 random bits for each sample number."""
    key = torch.tensor(_signed(seed & _WORD))
    for part in (epoch, stream):
        key = splitmix64(key) ^ part
    return splitmix64(splitmix64(key) ^ splitmix64(indices.long()))


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """What is random about one batch: the run's seed, the epoch, and which samples are in it."""

    seed: int
    epoch: int
    indices: Tensor

    def below(self, bound: int, *, stream: int) -> Tensor:
        """A whole number in [0, bound) for each sample; `stream` keeps the transforms apart."""
        bits = draw(seed=self.seed, epoch=self.epoch, stream=stream, indices=self.indices)
        # The upper 31 bits as a fraction, times the bound: no division, and no overflow below 2³².
        return (_shifted(bits, 33) * bound) >> 31
