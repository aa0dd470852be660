"""The largest elements alone (gradient dropping, Aji & Heafield 2017; Deep Gradient Compression, Lin et al. 2018).

A message has the k = ⌈density · n⌉ elements with the largest magnitudes, each as its place and its value. All others
wait at the sender, and are added to the next gradient. In the first `warm_up` steps the density falls from 25 % by the
same factor in every step: early gradients are large everywhere, and waiting would make them stale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from manyhands.comm.codecs.codec import Codec, refuse
from manyhands.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_DENSITY = 0.25


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The largest 1 %, 64 bits each, error feedback and warm-up (Deep Gradient Compression, Lin et al. 2018)."""

    is_sparse: ClassVar[bool] = True
    density: float = 0.01
    warm_up: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 0.5:
            raise UsageError(
                f"density={self.density:g}: it must be above 0 and at most 0.5, above which a place and a value for "
                "each element are more than all values"
            )
        if self.warm_up < 0:
            raise UsageError(f"warm_up={self.warm_up}: it must be a number of steps, 0 or more")

    def at(self, step: int) -> TopK:
        if step >= self.warm_up or self.density >= _FIRST_DENSITY:
            return self
        falls = (self.density / _FIRST_DENSITY) ** (step / self.warm_up)
        return replace(self, density=_FIRST_DENSITY * falls)

    def _count(self, length: int) -> int:
        return min(length, math.ceil(self.density * length))

    def size_bytes(self, length: int) -> int:
        return 8 * self._count(length)

    def encode(self, values: Tensor, message: Tensor) -> None:
        places, chosen = self._halves(message, values.numel())
        found = values.abs().topk(len(places), sorted=False).indices.sort().values
        places.copy_(found)
        chosen.copy_(values[found])

    def decode(self, message: Tensor, values: Tensor) -> None:
        places, chosen = self._halves(message, values.numel())
        if len(places) and (
            bool((places[1:] <= places[:-1]).any()) or int(places[0]) < 0 or int(places[-1]) >= values.numel()
        ):
            raise refuse("top-k", "places that are out of order or outside of the vector")
        values.zero_()
        values[places.long()] = chosen

    def _halves(self, message: Tensor, length: int) -> tuple[Tensor, Tensor]:
        import torch

        size = 4 * self._count(length)
        return message[:size].view(torch.int32), message[size:].view(torch.float32)
