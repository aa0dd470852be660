"""How long the forward and the backward pass of each layer take, each measured by itself."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.models.model_graph import ModelGraph, is_leaf

REPEATS = 5

_Call = tuple[nn.Module, Any, Any]  # a layer, and what it was called with


def add_times(graph: ModelGraph, model: nn.Module, inputs: Any) -> None:
    """Fill in the seconds of every layer, and of what contains layers their sum; functions have none.

    A layer runs again on what it got in a run of the model: several times, of which the median counts.
    """
    seconds: dict[str, tuple[float, float]] = {}
    for name, calls in _calls(model, inputs).items():
        each = [_measured(call) for call in calls]
        seconds[name] = sum(one[0] for one in each), sum(one[1] for one in each)
    for node in graph.nodes:
        inside = [own for name, own in seconds.items() if name == node.id or name.startswith(f"{node.id}.")]
        if inside:
            node.forward_s = sum(one[0] for one in inside)
            node.backward_s = sum(one[1] for one in inside)


def _calls(model: nn.Module, inputs: Any) -> Mapping[str, list[_Call]]:
    """What the layers are called with; a layer inside of another is part of that one."""
    found: dict[str, list[_Call]] = {}
    hooks, inside = [], [0]

    def watch(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not inside[0]:
                copied = tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, (args, kwargs))
                found.setdefault(name, []).append((module, *copied))
            inside[0] += 1

        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            inside[0] -= 1

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        if name and is_leaf(module):
            watch(name, module)
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _measured(call: _Call) -> tuple[float, float]:
    both = [_once(call) for _ in range(REPEATS)]
    return statistics.median(one[0] for one in both), statistics.median(one[1] for one in both)


def _once(call: _Call) -> tuple[float, float]:
    module, args, kwargs = call
    # A copy, since a layer that works in place may not change what it gets from outside of autograd.
    args, kwargs = tree_map(_fresh, (args, kwargs))
    began_s = time.perf_counter()
    outputs = module(*args, **kwargs)
    forward_s = time.perf_counter() - began_s
    made = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    if not made:
        return forward_s, 0.0
    gradients = [torch.ones_like(one) for one in made]
    began_s = time.perf_counter()
    torch.autograd.backward(made, gradients)
    backward_s = time.perf_counter() - began_s
    module.zero_grad(set_to_none=True)
    return forward_s, backward_s


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach()
    return copied.requires_grad_().clone() if copied.is_floating_point() else copied
