"""Gradients of large linear layers, kept as the factors they are made of.

A linear layer y = W x has the gradient  dW = Σ dyᵀ x  over the rows of a batch: two thin matrices say the same as the
large one. Workers of a host put their factors where all see them, and the owner of some rows of W makes the sum over
all workers of just these rows, while they are in its cache, right before it updates them. The large matrix is
never written, nor added up (sufficient factors: Xie et al. 2014; Poseidon, Zhang et al. 2017). Between hosts the
factors travel in its place (`factors_between.py`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from manyhands.replica.layout import SPAN_BYTES, Layout, Span
from manyhands.replica.memory import Team


def linear_weights(model: nn.Module) -> set[int]:
    """The ids of the parameters that are weights of linear layers. One that a parametrization or a subclass computes is
    no parameter, and to ask for it would compute it once more."""
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    return {id(layer._parameters["weight"]) for layer in layers if "weight" in layer._parameters}


def large_weights(model: nn.Module, params: Sequence[Tensor]) -> list[int]:
    """Of these, the weights of linear layers whose gradients are worth making where they are wanted, in one piece of
    memory that other processes see."""
    ids = linear_weights(model)
    return [index for index, param in enumerate(params) if id(param) in ids and param.nbytes >= SPAN_BYTES]


class Factors:
    """The factors of one step, of all workers of a host; what does not fit goes to `total` as a matrix."""

    def __init__(self, layout: Layout, total: Tensor, team: Team) -> None:
        self._mine = team.index
        self._set, sets = self._sets(team)  # where this worker's factors are, among how many
        self._layout = layout
        self._total = total
        self._slots: dict[int, int] = {}
        self._inputs: list[Tensor] = []  # by slot: workers × rows × features
        self._outputs: list[Tensor] = []
        for index, place in enumerate(layout.places):
            if place.factored:
                height, width = place.shape
                capacity = self._most_rows(height, width) // sets
                self._slots[index] = len(self._slots)
                for side, features in ((self._inputs, width), (self._outputs, height)):
                    length = sets * capacity * features
                    side.append(team.allocate(length, total.dtype).view(sets, capacity, features))
        # Per layer and worker: how many rows there are in this step, and whether there is more in `total`.
        shape = (len(self._slots), team.size)
        self._rows = team.allocate(shape[0] * shape[1], torch.int64).view(shape).numpy()
        self._overflowed = team.allocate(shape[0] * shape[1], torch.uint8).view(shape).numpy()
        self._overflow: dict[int, Tensor] = {}

    def _sets(self, team: Team) -> tuple[int, int]:
        return team.index, team.size

    def _most_rows(self, height: int, width: int) -> int:
        """Of all workers together: with more rows than that, the matrix itself would be less to write."""
        return height * width // (2 * (height + width))

    @property
    def layers(self) -> Collection[int]:
        """The parameters whose gradients may come as factors."""
        return self._slots.keys()

    def taken(self, *, streams: bool) -> Mapping[int, "Factors"]:
        """The parameters whose gradients come as factors in this step; those that `stream` to other hosts while the
        backward pass goes on are added up as they come."""
        return {} if streams else dict.fromkeys(self._slots, self)

    def begin(self, taken: Collection[int]) -> None:
        """A step begins, in which gradients of these parameters come as factors."""
        self._rows[:, self._mine] = 0
        self._overflowed[:, self._mine] = 0
        self._overflow.clear()

    def has(self, index: int) -> bool:
        """Whether this worker has a part of this parameter's gradient, as factors or as a matrix."""
        return bool(self._rows[self._slots[index], self._mine]) or index in self._overflow

    def add(self, index: int, inputs: Tensor, outputs: Tensor) -> None:
        """Some rows of a layer's inputs, and of the loss's gradient by its outputs."""
        slot = self._slots[index]
        first = int(self._rows[slot, self._mine])
        last = first + len(inputs)
        if last > self._inputs[slot].shape[1]:
            self.overflow(index, outputs.t() @ inputs)
            return
        self._inputs[slot][self._set, first:last].copy_(inputs)
        self._outputs[slot][self._set, first:last].copy_(outputs)
        self._rows[slot, self._mine] = last

    def made(self, index: int, rows: int) -> None:
        """So many rows of a layer became a matrix, because its gradient does not come as factors in this step."""

    def arrive(self, index: int) -> None:
        """This worker has all its rows of a layer."""

    def overflow(self, index: int, gradient: Tensor) -> None:
        """A part of a gradient that is not there as factors."""
        known = self._overflow.get(index)
        self._overflow[index] = gradient if known is None else known + gradient

    @property
    def overflows(self) -> bool:
        return bool(self._overflow)

    def flush(self) -> None:
        """Add to `total` what has overflown; workers take turns in their order."""
        for index, gradient in self._overflow.items():
            slot, place = self._slots[index], self._layout.places[index]
            into = self._total[place.start : place.stop].view(place.shape)
            if self._overflowed[slot, : self._mine].any():  # of the others, some may not have begun this step
                into.add_(gradient)
            else:
                into.copy_(gradient)
            self._overflowed[slot, self._mine] = 1
        self._overflow.clear()

    def sum_of(self, span: Span, into: Tensor) -> Tensor:
        """The gradient of some rows, over all workers; `into` may be their part of `total`."""
        (index,) = span.places
        slot, place = self._slots[index], self._layout.places[index]
        width = place.shape[1]
        top, bottom = (span.start - place.start) // width, (min(span.stop, place.stop) - place.start) // width
        rows = into[: (bottom - top) * width].view(bottom - top, width)
        into[(bottom - top) * width :].zero_()
        begun = bool(self._overflowed[slot].any())
        if begun:
            rows.copy_(self._total[span.start : span.start + rows.numel()].view_as(rows))
        for at, count in self._counts(slot):
            if count:
                left = self._outputs[slot][at, :count, top:bottom].t()
                right = self._inputs[slot][at, :count]
                if begun:
                    rows.addmm_(left, right)
                else:
                    torch.mm(left, right, out=rows)
                begun = True
        if not begun:
            rows.zero_()
        return into

    def _counts(self, slot: int) -> Iterable[tuple[int, int]]:
        """Where factors of a layer are, and how many rows, in the order of workers."""
        return enumerate(self._rows[slot].tolist())


Make = Callable[[int, Tensor, Tensor], Tensor | None]


class LinearLayers(TorchFunctionMode):
    """While it is active, `make(index, inputs, outputs)` makes the gradients of some weights of their factors; with
    None it keeps the factors, and the weight gets nothing."""

    def __init__(self, weights: Mapping[int, int], make: Make) -> None:
        super().__init__()
        self._weights = weights  # index by id
        self._make = make

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is functional.linear and _is_plain(*args, **(kwargs or {})):
            inputs, weight, bias = _operands(*args, **(kwargs or {}))
            index = self._weights.get(id(weight))
            if index is not None:
                return _Linear.apply(inputs, weight, bias, partial(self._make, index))  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


def _operands(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _is_plain(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """An ordinary product on the way to a gradient: no mixed precision, no function transforms, nothing that will be
    computed again on the way back (checkpointing), unwatched."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and input.dtype == weight.dtype
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


class _Linear(torch.autograd.Function):
    """`functional.linear`, whose backward pass lets another make the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, make: Callable[..., Tensor | None]
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.make = make
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        towards_inputs = grad @ weight if ctx.needs_input_grad[0] else None
        outputs = grad.reshape(-1, weight.shape[0])
        rows = inputs.reshape(-1, weight.shape[1])
        towards_weight = ctx.make(rows, outputs)
        towards_bias = outputs.sum(0) if ctx.needs_input_grad[2] else None
        return towards_inputs, towards_weight, towards_bias, None
