"""Copies of an optimizer without its parameters: they update pieces of spans, or are tried on toys."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

ELEMENT_WISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.SparseAdam,
)
"""Known to update every element by itself; exactly these classes, since a subclass may do anything."""

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # where torch keeps them


def twin(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with no parameters, no state and none of the hooks hung on the original."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler replaces it on the original, to see that it is called
    copy.__dict__.update(state=defaultdict(dict), param_groups=[])
    for name in HOOKS:
        if name in copy.__dict__:
            copy.__dict__[name] = type(copy.__dict__[name])()
    return copy


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """PyTorch wraps `step` of its own optimizers for profiling, hooks and the compiler; per span that is too much."""
    kind = type(optimizer)
    return inspect.unwrap(kind.step) if kind in ELEMENT_WISE else kind.step


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those that it holds as a wrapper or a chain does: each once, the outermost first."""
    seen, todo = set[int](), [optimizer]
    while todo:
        found = todo.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        if is_optimizer(found):
            yield found
            todo += [value for name, value in vars(found).items() if name not in ("state", "param_groups")]
        elif isinstance(found, Mapping):
            todo += found.values()
        elif isinstance(found, (list, tuple)):
            todo += found


def is_optimizer(found: Any) -> bool:
    """Also a wrapper that is no subclass of `Optimizer`."""
    return isinstance(found, Optimizer) or (hasattr(found, "param_groups") and hasattr(found, "zero_grad"))
