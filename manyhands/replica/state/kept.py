"""What a strategy keeps beside the parameters: its own dataclass, and as named tensors part of every checkpoint."""

import dataclasses
from collections.abc import Callable, ItemsView, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


class StrategyState(MutableMapping[str, Tensor]):
    """A strategy's dataclass, and a mapping of its fields as tensors, for checkpoints and for workers that join.

    A vector is saved as it is, a number or a tuple of numbers as a vector of doubles, None and what a field is by
    default not at all. What is written into the mapping is in the dataclass when the strategy asks for it next.
    """

    def __init__(self) -> None:
        self.state: Any = None  # until the strategy asks for it
        self._tensors: dict[str, Tensor] = {}

    def get_or_make(self, make: Callable[[], State]) -> State:
        """The strategy's state; what `make` makes, where a tensor of that name was restored, has that instead."""
        if self.state is None:
            self.state = _decoded(make(), self._tensors)
            self._tensors = {}
        state: State = self.state
        return state

    def __getitem__(self, name: str) -> Tensor:
        return self._encoded()[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._tensors, self.state = {**self._encoded(), name: tensor}, None

    def __delitem__(self, name: str) -> None:
        tensors = self._encoded()
        del tensors[name]
        self._tensors, self.state = tensors, None

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded())

    def __len__(self) -> int:
        return len(self._encoded())

    def items(self) -> ItemsView[str, Tensor]:
        return self._encoded().items()

    def clear(self) -> None:
        self._tensors, self.state = {}, None

    def _encoded(self) -> dict[str, Tensor]:
        if self.state is None:
            return dict(self._tensors)
        return {
            _name(field): value if isinstance(value, Tensor) else _vector(value)
            for field in dataclasses.fields(self.state)
            if (value := getattr(self.state, field.name)) is not None
            and (isinstance(value, Tensor) or value != field.default)
        }


def _name(field: Any) -> str:
    """As checkpoints name it."""
    return str(field.name).replace("_", " ")


def _vector(value: float | tuple[float, ...]) -> Tensor:
    return torch.tensor(value if isinstance(value, tuple) else [value], dtype=torch.float64)


def _decoded(value: State, tensors: dict[str, Tensor]) -> State:
    fields: tuple[Any, ...] = dataclasses.fields(value)  # type: ignore[arg-type]
    found = {field.name: tensors[_name(field)] for field in fields if _name(field) in tensors}
    for name, tensor in found.items():
        first = getattr(value, name)
        if isinstance(first, tuple):
            setattr(value, name, tuple(tensor.tolist()))
        elif isinstance(first, (int, float)):
            setattr(value, name, type(first)(tensor.item()))
        else:
            setattr(value, name, tensor)
    return value
