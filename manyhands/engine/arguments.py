"""Whether a session was given what it asks for: a module, an optimizer of it, and a function of model and batch."""

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy

from manyhands.engine.settings import Training
from manyhands.errors import UsageError
from manyhands.replica.optimizer.twins import is_optimizer


def admit_arguments(training: Training) -> None:
    """Refuse what would fail from inside, or be another thing than in plain PyTorch."""
    model: Any = training.model
    optimizer: Any = training.optimizer
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {_named(model)}, and must be a torch.nn.Module: mh.session(model, optimizer, loss)"
        )
    if isinstance(optimizer, type) or not is_optimizer(optimizer):
        raise UsageError(
            f"the optimizer is {_named(optimizer)}; make one of the model's parameters, as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    _admit_loss(training.loss)


def _named(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"of the type {type(thing).__name__}"


def _admit_loss(loss: Any) -> None:
    name = type(loss).__name__
    if isinstance(loss, _Loss):
        raise UsageError(
            f"{name} compares outputs with targets, and the session calls loss(model, batch); pass a function, as "
            "`lambda model, batch: criterion(model(batch[0]), batch[1])`"
        )
    if not callable(loss):
        raise UsageError(
            f"the loss is {_named(loss)}; pass a function loss(model, batch) that returns the mean"
        )
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # of something built in
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UsageError(
            f"the session calls loss(model, batch), and {getattr(loss, '__name__', name)}{signature} cannot be called "
            f"so ({error}); give it these two arguments"
        ) from None


def admit_data(data: Any, call: str) -> None:
    """Refuse what has no samples by number, before one is loaded."""
    gives = any(hasattr(data, name) for name in ("__getitem__", "__getitems__", "batch"))
    if not (gives and hasattr(data, "__len__")) or _is_by_name(data):
        raise UsageError(
            f"{call} takes a data set, which has a length and gives a sample for every number from 0 on, as a list of "
            f"samples does; this is {_named(data)}"
        )


def _is_by_name(data: Any) -> bool:
    """Whether items are found by names, as in a dict or in the columns of a table; some mappings have numbers, too."""
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return True
    if not isinstance(data, Mapping) or not len(data):
        return False
    try:
        data[0]  # of a mapping, that draws no random numbers
    except (KeyError, TypeError):
        return True
    return False


def admit_parameters(model: nn.Module, optimizer: Any) -> None:
    """Refuse parameters that could not be trained, or not as the optimizer has them."""
    named = dict(model.named_parameters())
    names = {id(param): name for name, param in named.items()}
    places: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in [*named.items(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise UsageError(
                f"{name!r} is on the device meta and has no values; fill the model before mh.session, as by "
                "model.to_empty(device='cpu') and loading a state"
            )
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    counts: defaultdict[int, int] = defaultdict(int)
    for param in trained:
        counts[id(param)] += 1
        if counts[id(param)] == 2:
            raise UsageError(
                f"the optimizer has parameter {names.get(id(param), 'of another model')!r} twice and would update it "
                "twice in a step; give it once"
            )
        if id(param) in names and not is_lazy(param) and param.numel():
            # One that has no memory on this machine is alone.
            places[param.data_ptr() or id(param)].append(names[id(param)])
    twice = next((found for found in places.values() if len(found) > 1), None)
    if twice:
        raise UsageError(
            f"parameters {twice[0]!r} and {twice[1]!r} have the same memory (param.data = other.data), so an update of "
            "one changes the other; tie them as one parameter: module.weight = other.weight"
        )
    if trained and not any(is_lazy(param) or param.numel() for param in trained):
        raise UsageError(
            f"none of the {len(trained)} parameters of the optimizer has an element; train others"
        )
