"""A model, data and optimizers whose results have the same bits on every x86-64 processor with AVX2.

BLAS adds up in an order of its own on each processor. Here that order leaves no trace: every activation and every
gradient of an activation is rounded to a grid, so products of two of them, and sums of such products, are exact; and
what is not exact (an activation times a full-precision weight) is rounded to the grid at once. Rates, momenta and
decays are short binary fractions, so it makes no difference where a processor fuses a multiplication with an addition.
`correct_roots` takes square roots in double precision: those of the vector library are the nearest number on some
processors, and its neighbour on others.
`random` makes the numbers: torch draws normal numbers with other instructions on other processors.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]

STEPS = 10
INPUTS, HIDDEN, OUTPUTS = 4, 8, 2
ACTIVATIONS, GRADIENTS = 2.0**8, 2.0**20  # points of the grids per unit
# What a dot product of BLAS leaves different between processors is far below this.
COARSE = 2.0**20


class _ToGrid(torch.autograd.Function):
    """Round forth and back; the slope of the rounding itself counts as 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return torch.round(values * ACTIVATIONS) / ACTIVATIONS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return torch.round(gradient * GRADIENTS) / GRADIENTS


class Grid(nn.Identity):
    def forward(self, values: Tensor) -> Tensor:
        return _ToGrid.apply(values)  # type: ignore[no-any-return]


class GridReLU(nn.ReLU):
    def forward(self, values: Tensor) -> Tensor:
        return _ToGrid.apply(values).relu()  # type: ignore[no-any-return]


class Single(nn.Linear):
    """Parameters in single precision, as people train; products in double, so that they are exact."""

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(values, self.weight.double(), self.bias.double())


def make_net(layer: type[nn.Linear], dtype: torch.dtype) -> nn.Module:
    net = nn.Sequential(
        layer(INPUTS, HIDDEN),
        GridReLU(),
        layer(HIDDEN, HIDDEN),
        GridReLU(),
        layer(HIDDEN, HIDDEN),
        GridReLU(),
        layer(HIDDEN, OUTPUTS),
        Grid(),
    ).to(dtype)
    source = random.Random(3)
    with torch.no_grad():
        for param in net.parameters():
            values = [source.uniform(-0.6, 0.6) for _ in range(param.numel())]
            param.copy_(torch.tensor(values, dtype=torch.float64).view_as(param))
    return net


single_precision = functools.partial(make_net, Single, torch.float32)
double_precision = functools.partial(make_net, nn.Linear, torch.float64)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).sum(1).mean()


def make_batch(seed: str, size: int) -> Batch:
    source = random.Random(seed)

    def on_grid(columns: int) -> Tensor:
        values = [source.randrange(-256, 257) / ACTIVATIONS for _ in range(size * columns)]
        return torch.tensor(values, dtype=torch.float64).view(size, columns)

    return on_grid(INPUTS), on_grid(OUTPUTS)


def batches_of(step: int, rank: int) -> list[Batch]:
    """What a worker brings to a step: batches of different sizes, and now and then two of them."""
    count = 2 if step % 4 == 3 else 1
    return [make_batch(f"{step} {rank} {index}", 2 + (step + rank + index) % 3) for index in range(count)]


def even_batch(rank: int, workers: int) -> Batch:
    """What a worker brings to every step where the clock decides who adds up what: 2, 4 or 8 samples in all.

    The weight of a sample is then a binary fraction, and sums are exact in any order.
    """
    assert workers in (1, 2, 3)
    return make_batch(f"even {rank}", 4 if rank == 2 else 2)


def _momentum(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=2**-5, momentum=0.5, weight_decay=2**-7)


def _adamw(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=2**-6, betas=(0.75, 0.875), weight_decay=2**-7)


def _lbfgs(net: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {"momentum": _momentum, "adamw": _adamw}
ONLY: dict[str, Callable[[nn.Module], Optimizer]] = {"lbfgs": _lbfgs}
"""For strategies that train with this optimizer alone."""


@contextlib.contextmanager
def correct_roots() -> Iterator[None]:
    """While every square root of a tensor in single precision is the nearest number."""
    library = Tensor.sqrt

    def nearest(values: Tensor) -> Tensor:
        return library(values.double()).to(values.dtype)

    Tensor.sqrt = nearest  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.sqrt = library  # type: ignore[method-assign]


def as_bytes(params: Sequence[Tensor], *, coarse: bool) -> bytes:
    flat = torch.cat([param.detach().flatten() for param in params])
    return (torch.round(flat * COARSE) / COARSE if coarse else flat).numpy().tobytes()
