"""What a loss function returns: the loss, and perhaps more beside it.

A tensor is the loss itself. Of a tuple or list the first value is; of a dict, a dataclass or another object what is
called `loss`, and of a dict without that name the first value.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from manyhands.errors import UsageError
from manyhands.replica.share import Results


def loss_in(returned: Any) -> Tensor:
    """The loss, which must have a gradient."""
    loss = loss_of(returned)
    if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
        raise UsageError(_complaint(loss))
    return loss


def number_in(returned: Any) -> float:
    """What a loss or a measure is worth, with or without a gradient."""
    value = loss_of(returned)
    if value is None or (isinstance(value, Tensor) and value.numel() != 1):
        raise UsageError(_complaint(value))
    return float(value)


def loss_of(returned: Any) -> Any:
    """What stands where the loss should be."""
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        return returned["loss"] if "loss" in returned else next(iter(returned.values()), None)
    if hasattr(returned, "loss"):
        return returned.loss
    return next(iter(returned), None) if isinstance(returned, (tuple, list)) else returned


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward pass of the loss leaves gradients in."""
    seen, left = {loss.grad_fn}, [loss.grad_fn]
    while left:
        node: Any = left.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        for inner, _ in getattr(node, "next_functions", ()):
            if inner is not None and inner not in seen:
                seen.add(inner)
                left.append(inner)


def _complaint(loss: Any) -> str:
    """Why it cannot be trained on, and what to change."""
    if loss is None:
        return "the loss function returned nothing; end it with `return loss`"
    if not isinstance(loss, Tensor):
        return (
            f"the loss function returned {loss!r:.40}, a {type(loss).__name__} without a gradient; return the tensor "
            "itself, without .item() or float()"
        )
    if loss.numel() != 1:
        return (
            f"the loss function returned a tensor of the shape {tuple(loss.shape)} instead of one number; "
            "return its mean: `return loss.mean()`"
        )
    if not loss.is_floating_point():
        return (
            f"the loss is a whole number ({loss.dtype}), which has no gradient; compute it from the model's outputs, "
            "without argmax or comparisons"
        )
    return (
        "the loss has no gradient; compute it from the model's outputs without .detach(), .data or torch.no_grad(), "
        "and have at least one trained parameter with requires_grad in it"
    )


def detached(returned: Any) -> Any:
    """The same without gradients."""
    return returned.detach() if isinstance(returned, Tensor) else _mapped(returned, detached)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, with every value in it changed."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _changed(getattr(value, name), change) for name in fields})
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_changed(item, change) for item in value)
    return value


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    return change(value) if isinstance(value, Tensor) else _mapped(value, change)


def combined(results: Results) -> Any:
    """One result of several batches: numbers become their means, weighted by samples; tensors with a row for every
    sample are put one behind the other; everything else becomes a list."""
    values, samples = [value for value, _ in results], [count for _, count in results]
    first = values[0]
    if len(values) == 1:
        return first
    if any(type(value) is not type(first) for value in values):
        return values
    if isinstance(first, Tensor):
        return _one_tensor(values, samples)
    if isinstance(first, float):
        return sum(value * count for value, count in zip(values, samples, strict=True)) / sum(samples)
    pieces = _pieces(values)
    if pieces is None:
        return values
    return _put_together(first, [combined(list(zip(piece, samples, strict=True))) for piece in pieces])


def _one_tensor(values: Sequence[Tensor], samples: Sequence[int]) -> Any:
    if all(value.numel() == 1 and value.is_floating_point() for value in values):
        total = cast(Tensor, sum(value * count for value, count in zip(values, samples, strict=True)))
        return total / sum(samples)
    has_rows = all(value.dim() and len(value) == count for value, count in zip(values, samples, strict=True))
    if has_rows and len({value.shape[1:] for value in values}) == 1:
        return torch.cat(list(values))
    return list(values)


def _pieces(values: Sequence[Any]) -> list[list[Any]] | None:
    """By place in the structure, the values there; None where they have no common structure."""
    first = values[0]
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return [[getattr(value, name) for value in values] for name in names]
    if isinstance(first, Mapping):
        is_alike = all(value.keys() == first.keys() for value in values)
        return [[value[key] for value in values] for key in first] if is_alike else None
    if isinstance(first, (tuple, list)) and all(len(value) == len(first) for value in values):
        return [list(piece) for piece in zip(*values, strict=True)]
    return None


def _put_together(like: Any, parts: Sequence[Any]) -> Any:
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        names = [field.name for field in dataclasses.fields(like) if field.init]
        return dataclasses.replace(like, **dict(zip(names, parts, strict=True)))
    if isinstance(like, Mapping):
        return dict(zip(like, parts, strict=True))
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
