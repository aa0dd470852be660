"""Optimizers by name: `adamw:lr=0.001,weight_decay=0.1`."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands import spec
from manyhands.errors import UnknownName, UsageError

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "lbfgs": torch.optim.LBFGS,
}

LINE_SEARCHES = ("strong_wolfe",)  # of L-BFGS; without one it takes steps of the learning rate


def make_optimizer(text: str, model: nn.Module) -> Optimizer:
    """`adamw:lr=0.001,weight_decay=0.1` → the optimizer over the model's parameters."""
    name, positional, settings = spec.split(text)
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    if positional:
        raise UsageError(f"optimizer {text!r}: write settings as key=value, not {positional[0]!r}")
    known = dict(inspect.signature(OPTIMIZERS[name]).parameters)
    del known["params"]
    values = {key: _setting(name, key, value, known) for key, value in settings.items()}
    try:
        return OPTIMIZERS[name](model.parameters(), **values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"optimizer {text!r}: {error}") from None


def _setting(name: str, key: str, value: str, known: Mapping[str, inspect.Parameter]) -> Any:
    """What an optimizer declares says little about types; its defaults say the rest."""
    if key not in known:
        raise UnknownName(f"setting of optimizer {name}", key, known)
    where = f"optimizer {name}:{key}"
    default = known[key].default
    if isinstance(default, tuple):
        values = spec.convert(value, tuple[float, ...], where)
        if len(values) != len(default):
            raise UsageError(
                f"{where}={value}: expected {len(default)} numbers, as in {'-'.join(map(str, default))}"
            )
        return values
    declared = known[key].annotation
    if declared == str | None:
        if value not in LINE_SEARCHES:
            raise UnknownName(f"{key} of optimizer {name}", value, LINE_SEARCHES)
        return value
    if declared in (int, int | None):
        return spec.convert(value, int, where)
    if isinstance(default, bool) or default is None:
        return spec.convert(value, bool, where)
    return spec.convert(value, float, where)
