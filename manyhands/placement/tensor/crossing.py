"""What crosses between workers that divide a layer, forward and back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.comm import Comm, bits


def edges(length: int, ways: int) -> list[int]:
    return [length * way // ways for way in range(ways + 1)]


def _gathered(slice_: Tensor, dim: int, limits: Sequence[int], comm: Comm) -> Tensor:
    """The slices of all workers side by side, to the bit: whole numbers are added where the others have zeros."""
    shape = list(slice_.shape)
    shape[dim] = limits[-1]
    whole = slice_.new_zeros(shape)
    whole.narrow(dim, limits[comm.rank], limits[comm.rank + 1] - limits[comm.rank]).copy_(slice_)
    comm.sum_(bits(whole.view(-1)))
    return whole


def _own(whole: Tensor, dim: int, limits: Sequence[int], comm: Comm) -> Tensor:
    start = limits[comm.rank]
    return whole.narrow(dim, start, limits[comm.rank + 1] - start).contiguous()


def _summed(part: Tensor, comm: Comm) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    comm.sum_(total.view(-1))
    return total


class Copy(torch.autograd.Function):
    """The same value to all; its gradient is the sum of what each makes of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.comm), None


class SumAcross(torch.autograd.Function):
    """The sum over all; every part of it has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Comm) -> Tensor:
        return _summed(part, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Gather(torch.autograd.Function):
    """The slices of all workers side by side; each worker takes its own of the gradient."""

    @staticmethod
    def forward(ctx: Any, slice_: Tensor, dim: int, limits: Sequence[int], comm: Comm) -> Tensor:
        ctx.dim, ctx.limits, ctx.comm = dim, limits, comm
        return _gathered(slice_, dim, limits, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(gradients[0], ctx.dim, ctx.limits, ctx.comm), None, None, None


class Split(torch.autograd.Function):
    """This worker's slice of a value that all have; the gradients of all slices make that of the value."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, comm: Comm) -> Tensor:
        ctx.dim, ctx.limits, ctx.comm = dim, edges(whole.shape[dim], comm.size), comm
        return _own(whole, dim, ctx.limits, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0], ctx.dim, ctx.limits, ctx.comm), None, None
