"""Where the values that one worker has of a tensor lie in the whole tensor."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """A range of one dimension, or of the flattened tensor with zeros at its end; all of it where it is not cut.

    A dimension that holds several `blocks` one after the other is cut in each of them.
    """

    shape: tuple[int, ...]  # of the whole tensor
    cut: bool = False
    dim: int | None = None  # along which it is cut; None: flattened
    start: int = 0
    stop: int = 0
    padding: int = 0
    blocks: int = 1

    @property
    def own_shape(self) -> tuple[int, ...]:
        if not self.cut:
            return self.shape
        if self.dim is None:
            return (self.stop - self.start + self.padding,)
        length = self.blocks * (self.stop - self.start)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """The worker's part of a whole tensor."""
        part = self._view(whole)
        if self.blocks > 1 and self.dim is not None:
            part = part.flatten(self.dim, self.dim + 1)
        return F.pad(part, (0, self.padding)) if self.padding else part

    def put(self, own: Tensor, whole: Tensor) -> None:
        """Write the worker's part into a whole tensor, which must be contiguous."""
        part = own.view(self.own_shape)
        view = self._view(whole)
        with torch.no_grad():
            view.copy_(part[: self.stop - self.start] if self.padding else part.view(view.shape))

    def _view(self, whole: Tensor) -> Tensor:
        if not self.cut:
            return whole
        if self.dim is None:
            return whole.reshape(-1)[self.start : self.stop]
        if self.blocks > 1:
            apart: Tensor = whole.unflatten(self.dim, (self.blocks, -1))
            return apart.narrow(self.dim + 1, self.start, self.stop - self.start)
        return whole.narrow(self.dim, self.start, self.stop - self.start)
