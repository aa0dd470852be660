"""What crosses between workers that divide a layer, forward and back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.comm import Comm, bits
from manyhands.errors import UsageError
from manyhands.replica.state.slice_of import TensorSlice


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


# Each backward pass is the forward pass of another one, so that gradients of gradients cross as well.


class Copy(torch.autograd.Function):
    """The same value to all; its gradient is the sum of what each makes of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return SumAcross.apply(gradients[0], ctx.comm), None  # type: ignore[no-untyped-call]


class SumAcross(torch.autograd.Function):
    """The sum over all; every part of it has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return _summed(part, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Copy.apply(gradients[0], ctx.comm), None  # type: ignore[no-untyped-call]


class Gather(torch.autograd.Function):
    """The slices of all workers side by side; each worker takes its own of the gradient."""

    @staticmethod
    def forward(ctx: Any, slice_: Tensor, dim: int, limits: Sequence[int], comm: Comm) -> Tensor:
        ctx.settings = dim, limits, comm
        return _gathered(slice_, dim, limits, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Take.apply(gradients[0], *ctx.settings), None, None, None  # type: ignore[no-untyped-call]


class _Take(torch.autograd.Function):
    """This worker's slice of a value that all have; the gradients of all slices make that of the value."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, limits: Sequence[int], comm: Comm) -> Tensor:
        ctx.settings = dim, limits, comm
        return _own(whole, dim, limits, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Gather.apply(gradients[0], *ctx.settings), None, None, None  # type: ignore[no-untyped-call]


def split(whole: Tensor, dim: int, comm: Comm) -> Tensor:
    """This worker's slice, of about equal ones."""
    made: Tensor = _Take.apply(whole, dim, edges(whole.shape[dim], comm.size), comm)  # type: ignore[no-untyped-call]
    return made


class PutTogether(torch.autograd.Function):
    """All of a tensor, of which each worker has a piece or nothing; each takes its own of the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor | None, piece: TensorSlice, comm: Comm, dtype: torch.dtype) -> Tensor:
        ctx.piece, ctx.is_here = piece, own is not None
        whole = torch.zeros(piece.shape, dtype=dtype)
        if own is not None:
            piece.put(own, whole)
        comm.sum_(bits(whole.view(-1)))
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        if (
            torch.is_grad_enabled()
        ):  # a worker that has nothing of the tensor would not take part in the next pass
            raise UsageError(
                "the loss takes gradients of gradients, and uses a parameter that lies in parts on several workers "
                "outside of its layer; use --placement sharded or none"
            )
        return (ctx.piece.of(gradients[0]).clone() if ctx.is_here else None), None, None, None
