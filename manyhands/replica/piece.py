"""Where the values that one worker has of a tensor lie in the whole tensor."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of one dimension, or of the flattened tensor; all of it where nothing else is said."""

    shape: tuple[int, ...]  # of the whole tensor
    dim: int | None = None  # along which it is cut; None: flattened
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        length = prod(self.shape) if self.dim is None else self.shape[self.dim]
        return self.start == 0 and self.stop in (None, length)

    @property
    def own_shape(self) -> tuple[int, ...]:
        if self.is_whole:
            return self.shape
        assert self.stop is not None
        if self.dim is None:
            return (self.stop - self.start,)
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """The worker's part of a whole tensor, as a view of it where that can be."""
        if self.is_whole:
            return whole
        assert self.stop is not None
        if self.dim is None:
            return whole.reshape(-1)[self.start : self.stop]
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def put(self, own: Tensor, whole: Tensor) -> None:
        """Write the worker's part into a whole tensor, which must be contiguous."""
        with torch.no_grad():
            self.of(whole).copy_(own.view(self.own_shape))
