"""The user's own data: `package.module:callable`, called with no arguments.

It returns a `Data`, a pair of data sets (train, test), or one data set of which a seeded tenth is held out.
"""

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from manyhands import spec
from manyhands.data.loading import gather
from manyhands.data.request import Request
from manyhands.data.sets import Data, Samples
from manyhands.errors import DataError, UsageError

_HELD_OUT = 0.1
_SCAN = 1024
_WAY_OUT = "return a manyhands.data.Data, which says it"


def load(request: Request) -> Data:
    make = spec.imported(request.text, "data")
    if not callable(make):
        raise UsageError(f"--data {request.text}: it is a {type(make).__name__}, not something to call")
    made = make()
    if isinstance(made, Data):
        return made
    if isinstance(made, (tuple, list)) and len(made) == 2:
        train, test = made
    else:
        train, test = _split(made, request)
    for part in (train, test):
        _check(part, request)
    shape, classes, task = _facts(train, test, request)
    return Data(name=request.text, train=train, test=test, shape=shape, classes=classes, task=task)


def _check(part: Any, request: Request) -> None:
    if not (isinstance(part, Sized) and hasattr(part, "__getitem__")):
        raise DataError(
            f"--data {request.text} returned a {type(part).__name__}; expected a Data, a pair of data sets "
            f"with a length and samples by number, or one such data set"
        )
    if len(part) == 0:
        raise DataError(f"--data {request.text} returned an empty data set")


def _split(made: Any, request: Request) -> tuple[Samples, Samples]:
    _check(made, request)
    if len(made) < 2:
        raise DataError(
            f"--data {request.text} returned 1 sample, which cannot be split; return (train, test)"
        )
    order = torch.randperm(len(made), generator=torch.Generator().manual_seed(request.seed)).tolist()
    held_out = max(1, round(_HELD_OUT * len(made)))
    return Subset(made, sorted(order[held_out:])), Subset(made, sorted(order[:held_out]))


def _facts(train: Samples, test: Samples, request: Request) -> tuple[tuple[int, ...], int, str]:
    """Shape, classes and task, from the first sample and the labels."""
    inputs, targets = _pair(train, torch.arange(1), request)
    shape = tuple(inputs.shape[1:])
    if targets.is_floating_point() or targets.is_complex():
        raise DataError(
            f"--data {request.text}: targets are {targets.dtype}, so there are no classes; {_WAY_OUT}"
        )
    if targets.ndim > 1:
        highest = max(_highest(part, request, with_inputs=True) for part in (train, test))
        return shape, highest + 1, "next-token"
    named = getattr(train, "classes", None)
    if isinstance(named, int):
        return shape, named, "classify"
    if isinstance(named, (list, tuple)):
        return shape, len(named), "classify"
    return shape, max(_highest(part, request, with_inputs=False) for part in (train, test)) + 1, "classify"


def _highest(part: Samples, request: Request, *, with_inputs: bool) -> int:
    labels = getattr(part, "targets", None)
    if labels is not None and not with_inputs:
        return int(torch.as_tensor(labels).max())
    highest = 0
    for indices in torch.split(torch.arange(len(part)), _SCAN):
        inputs, targets = _pair(part, indices, request)
        highest = max(highest, int(targets.max()), int(inputs.max()) if with_inputs else 0)
    return highest


def _pair(part: Samples, indices: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    batch = gather(part, indices, epoch=0)
    if not (
        isinstance(batch, (tuple, list))
        and len(batch) == 2
        and all(isinstance(half, Tensor) for half in batch)
    ):
        raise DataError(
            f"--data {request.text}: samples are not pairs of (input, target) tensors, so their shape and "
            f"classes are unknown; {_WAY_OUT}"
        )
    return batch[0], batch[1]
