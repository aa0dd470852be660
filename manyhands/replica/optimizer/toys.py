"""A copy of an optimizer whose parameters are small tensors, on which it may be tried."""

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.replica.optimizer.twins import HOOKS, is_optimizer, optimizers_in, settings_of

_MOST = 8  # toys that stand for all parameters
_ALIKE = 2  # toys that stand for parameters of one kind
_SIDE = 5  # the longest side of a small toy
_NUMBERS = 64  # elements of a tensor that an optimizer may hold beside its state and still be copied

PLAIN = (bool, int, float, str, type(None))


class Toy:
    """A small tensor in the place of a parameter."""

    def __init__(self, tensor: Tensor, group: int) -> None:
        self.tensor = tensor
        self.group = group
        self.first = tensor.detach().clone()
        places = torch.arange(self.first.numel(), dtype=self.first.dtype)
        self._slopes = torch.sin(places * 0.7 + 0.5)

    @property
    def update(self) -> Tensor:
        """By how much it has changed so far."""
        return self.tensor.detach() - self.first

    def gradient(self, step: int, number: int, scale: float) -> Tensor:
        """Other numbers for each step and toy."""
        return (self._slopes.roll(step + number) * scale).view(self.first.shape)


class Toys:
    """The copy, and those of its parameters that get gradients."""

    def __init__(self, optimizer: Any, elements: int = 0) -> None:
        """Toys have a few elements each; about so many, if they are said and the parameter has as many."""
        chosen = {id(param): group for group, param in _representatives(optimizer)}
        memo: dict[int, Any] = {}
        made: dict[int, Toy] = {}
        idle = nn.Parameter(torch.zeros(1))
        for one in optimizers_in(optimizer):
            for group in one.param_groups:
                for param in group["params"]:
                    if id(param) in chosen and id(param) not in memo:
                        made[id(param)] = toy = Toy(_small(param, elements), chosen[id(param)])
                        memo[id(param)] = toy.tensor
                    memo.setdefault(id(param), idle)
        self.copy = _copied(optimizer, memo)
        self.chosen = list(made.values())

    def values(self) -> list[Tensor]:
        return [toy.tensor.detach() for toy in self.chosen]

    def settings(self) -> list[dict[str, str]]:
        """By group, what its settings are now."""
        return [
            {name: repr(value) for name, value in settings_of(group).items()}
            for group in self.copy.param_groups
        ]


def _representatives(optimizer: Any) -> Iterator[tuple[int, Tensor]]:
    """Of the parameters that an optimizer may treat alike, a few, each with its group."""
    counts: defaultdict[Any, int] = defaultdict(int)
    for number, group in enumerate(optimizer.param_groups):
        choices = [(name, value) for name, value in group.items() if type(value) in (bool, str)]
        for param in group["params"]:
            kind = (param.ndim, str(choices), str(vars(param)) if vars(param) else "")
            if param.numel() and counts[kind] < _ALIKE and sum(counts.values()) < _MOST:
                counts[kind] += 1
                yield number, param


def _small(param: Tensor, elements: int) -> nn.Parameter:
    shape = [min(size, _SIDE - dim % 2) for dim, size in enumerate(param.shape)]
    if elements:
        ratio = min(1.0, (elements / max(1, param.numel())) ** (1 / max(1, param.ndim)))
        shape = [max(1, math.ceil(size * ratio)) for size in param.shape]
    values = torch.cos(torch.arange(math.prod(shape), dtype=torch.float64)).view(shape)
    is_common = param.dtype in (torch.float32, torch.float64)
    toy = nn.Parameter(values.to(param.dtype if is_common else torch.float32))
    vars(toy).update(vars(param))  # an optimizer may read what a person has written on a parameter
    return toy


def _copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of all optimizers in it, without state and hooks; `memo` has what stands for the parameters."""
    originals = list(optimizers_in(optimizer))
    for one in originals:
        memo[id(one)] = object.__new__(type(one))
        for name in HOOKS:
            if name in vars(one):
                memo[id(vars(one)[name])] = OrderedDict()
        if "state" in vars(one):
            memo[id(one.state)] = defaultdict(dict)
    for one in originals:
        # A scheduler replaces `step` on the original, to see that it is called.
        inside = {name: value for name, value in vars(one).items() if name != "step"}
        vars(memo[id(one)]).update({name: copy.deepcopy(value, memo) for name, value in inside.items()})
    return memo[id(optimizer)]


def uncopyable(optimizer: Any) -> str:
    """Why a copy would not do what the original does, or would be large; empty if it may be copied."""
    for one in optimizers_in(optimizer):
        params = {id(param) for group in one.param_groups for param in group["params"]}
        for name, value in vars(one).items():
            if name in ("state", "param_groups", "step"):
                continue
            for found in _contents(value):
                if isinstance(found, nn.Module):
                    return "it looks into the model"
                if isinstance(found, Tensor) and id(found) not in params and found.numel() > _NUMBERS:
                    return "it keeps tensors of its own"
                if isinstance(found, FunctionType) and found.__closure__:
                    return "it calls functions that may look at other parameters"
    return ""


def described(optimizer: Any) -> str:
    """What an optimizer and those in it hold beside groups and state, in words that change if it does."""
    words = []
    for one in optimizers_in(optimizer):
        for name, value in sorted(vars(one).items()):
            if name not in ("state", "param_groups", "defaults"):
                for found in _contents(value):
                    words.append(f"{name} {_word(found)}")
    return "\n".join(words)


def _word(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"{tuple(found.shape)} {found.detach().double().sum().item()}"
    return repr(found) if isinstance(found, PLAIN) else type(found).__name__


def _contents(value: Any) -> Iterator[Any]:
    """What is in lists and mappings, but not in the optimizers there."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _contents(key)
            yield from _contents(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _contents(item)
    elif not is_optimizer(value):
        yield value
