"""L-BFGS whose vectors lie on the servers: the arithmetic is torch's own, and only numbers travel.

torch.optim.LBFGS asks of its gradients, directions and history a dozen operations. `Far` has them, and does each on the
servers, every server on the part that it owns. So no process holds a history, and the steps, the line search included,
are those of torch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from manyhands.replica.optimizer.abilities import settings_of
from manyhands.servers.process.vectors import GRADIENT, PARAMS

Terms = list[tuple[str, float]]


class Desk(Protocol):
    """The servers, as far as they compute with vectors."""

    def combine(self, vector: str, terms: Terms, forgotten: list[str]) -> None: ...

    def measure(self, kind: str, one: str, other: str) -> list[float]: ...


class _Names:
    """Names for new vectors, and those that nobody uses any more, until the servers hear of it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._numbers = itertools.count()
        self.unused: list[str] = []

    def new(self) -> str:
        return f"v{next(self._numbers)}"

    def combine(self, vector: str, terms: Terms) -> None:
        unused, self.unused = self.unused, []
        self._desk.combine(vector, terms, unused)

    def dot(self, one: str, other: str) -> float:
        return math.fsum(self._desk.measure("dot", one, other))


class Far:
    """A vector on the servers; gone from there when nobody here refers to it."""

    def __init__(self, names: _Names, terms: Terms) -> None:
        self._names = names
        self.name = names.new()
        names.combine(self.name, terms)

    def __del__(self) -> None:
        self._names.unused.append(self.name)

    def mul(self, factor: Any) -> "Far":
        return Far(self._names, [(self.name, float(factor))])

    def neg(self) -> "Far":
        return self.mul(-1)

    def clone(self, memory_format: Any = None) -> "Far":
        return self.mul(1)

    def sub(self, other: "Far") -> "Far":
        return Far(self._names, [(self.name, 1.0), (other.name, -1.0)])

    def add_(self, other: "Far", alpha: Any = 1) -> "Far":
        self._names.combine(self.name, [(self.name, 1.0), (other.name, float(alpha))])
        return self

    def copy_(self, other: "Far") -> "Far":
        self._names.combine(self.name, [(other.name, 1.0)])
        return self

    def dot(self, other: "Far") -> Tensor:
        return _number(self._names.dot(self.name, other.name))

    def abs(self) -> "_Magnitudes":
        return _Magnitudes(self._names._desk, self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0].mul(args[1]) if function is torch.mul else NotImplemented


class _Magnitudes:
    """|v|, of which only two numbers are ever asked for."""

    def __init__(self, desk: Desk, vector: Far) -> None:
        self._desk = desk
        self._vector = vector  # also keeps it alive

    def max(self) -> Tensor:
        return _number(max(self._desk.measure("largest", self._vector.name, self._vector.name)))

    def sum(self) -> Tensor:
        return _number(math.fsum(self._desk.measure("magnitudes", self._vector.name, self._vector.name)))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class Minimizer(LBFGS):
    """The user's L-BFGS, with its settings as they are at every step."""

    def __init__(self, optimizer: Optimizer, desk: Desk, clip_norm: float | None) -> None:
        self._original = optimizer
        self._names = _Names(desk)
        self._clip_norm = clip_norm
        super().__init__([torch.zeros(1)])  # a stand-in: what it would touch is on the servers

    def minimize(self, gradient: Callable[[], float]) -> float:
        """One step; `gradient` has the loss evaluated where the parameters are, and its gradient put on the servers."""
        self.param_groups[0].update(settings_of(self._original.param_groups[0]))
        return float(self.step(gradient))  # type: ignore[no-untyped-call]

    # What torch's L-BFGS does with parameters and gradients themselves

    def _gather_flat_grad(self) -> Far:
        factor = 1.0
        if self._clip_norm is not None:
            norm = math.sqrt(self._names.dot(GRADIENT, GRADIENT))
            factor = min(1.0, self._clip_norm / (norm + 1e-6))
        return Far(self._names, [(GRADIENT, factor)])

    def _add_grad(self, step_size: Any, update: Far) -> None:
        self._names.combine(PARAMS, [(PARAMS, 1.0), (update.name, float(step_size))])

    def _clone_param(self) -> list[Far]:
        return [Far(self._names, [(PARAMS, 1.0)])]

    def _set_param(self, params_data: Sequence[Far]) -> None:
        self._names.combine(PARAMS, [(params_data[0].name, 1.0)])
