"""L-BFGS whose vectors lie on the servers: the arithmetic is torch's own, and only numbers travel.

torch.optim.LBFGS asks of its gradients, directions and history a dozen operations. `RemoteVector` has them, and does
each on the servers, every server on the part that it owns. So no process holds a history, and the steps, the line
search included, are those of torch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from manyhands.replica.optimizer.clipped_path import clip_factor
from manyhands.replica.optimizer.twins import settings_of
from manyhands.servers.protocol.messages import GRADIENT, PARAMS

Terms = list[tuple[str, float]]


class VectorServers(Protocol):
    """The servers, as far as they compute with vectors."""

    def combine(self, vector: str, terms: Terms, forgotten: list[str]) -> None: ...

    def measure(self, kind: str, one: str, other: str) -> list[float]: ...


class _Names:
    """Names for new vectors, and those that are out of use, until the servers hear of it."""

    def __init__(self, servers: VectorServers) -> None:
        self._servers = servers
        self._numbers = itertools.count()
        self.unused: list[str] = []

    def new(self) -> str:
        return f"v{next(self._numbers)}"

    def combine(self, vector: str, terms: Terms) -> None:
        unused, self.unused = self.unused, []
        self._servers.combine(vector, terms, unused)

    def dot(self, one: str, other: str) -> float:
        return math.fsum(self._servers.measure("dot", one, other))


class RemoteVector:
    """A vector on the servers; the servers forget it when this process no longer refers to it."""

    def __init__(self, names: _Names, terms: Terms) -> None:
        self._names = names
        self.name = names.new()
        names.combine(self.name, terms)

    def __del__(self) -> None:
        self._names.unused.append(self.name)

    def mul(self, factor: Any) -> "RemoteVector":
        return RemoteVector(self._names, [(self.name, float(factor))])

    def neg(self) -> "RemoteVector":
        return self.mul(-1)

    def clone(self, memory_format: Any = None) -> "RemoteVector":
        return self.mul(1)

    def sub(self, other: "RemoteVector") -> "RemoteVector":
        return RemoteVector(self._names, [(self.name, 1.0), (other.name, -1.0)])

    def add_(self, other: "RemoteVector", alpha: Any = 1) -> "RemoteVector":
        self._names.combine(self.name, [(self.name, 1.0), (other.name, float(alpha))])
        return self

    def copy_(self, other: "RemoteVector") -> "RemoteVector":
        self._names.combine(self.name, [(other.name, 1.0)])
        return self

    def dot(self, other: "RemoteVector") -> Tensor:
        return _number(self._names.dot(self.name, other.name))

    def abs(self) -> "_Magnitudes":
        return _Magnitudes(self._names._servers, self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0].mul(args[1]) if function is torch.mul else NotImplemented


class _Magnitudes:
    """|v|, of which only two numbers are ever asked for."""

    def __init__(self, servers: VectorServers, vector: RemoteVector) -> None:
        self._servers = servers
        self._vector = vector  # also keeps it alive

    def max(self) -> Tensor:
        return _number(max(self._servers.measure("largest", self._vector.name, self._vector.name)))

    def sum(self) -> Tensor:
        return _number(math.fsum(self._servers.measure("magnitudes", self._vector.name, self._vector.name)))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class Minimizer(LBFGS):
    """The user's L-BFGS, with its settings as they are at every step."""

    def __init__(self, optimizer: Optimizer, servers: VectorServers, clip_norm: float | None) -> None:
        self._original = optimizer
        self._names = _Names(servers)
        self._clip_norm = clip_norm
        super().__init__([torch.zeros(1)])  # a stand-in: what it would touch is on the servers

    def minimize(self, gradient: Callable[[], float]) -> float:
        """One step; `gradient` has the loss evaluated where the parameters are, and its gradient put on the servers."""
        self.param_groups[0].update(settings_of(self._original.param_groups[0]))
        return float(self.step(gradient))  # type: ignore[no-untyped-call]

    # What torch's L-BFGS does with parameters and gradients themselves

    def _gather_flat_grad(self) -> RemoteVector:
        factor = 1.0
        if self._clip_norm is not None:
            norm = math.sqrt(self._names.dot(GRADIENT, GRADIENT))
            factor = clip_factor(self._clip_norm, norm)
        return RemoteVector(self._names, [(GRADIENT, factor)])

    def _add_grad(self, step_size: Any, update: RemoteVector) -> None:
        self._names.combine(PARAMS, [(PARAMS, 1.0), (update.name, float(step_size))])

    def _clone_param(self) -> list[RemoteVector]:
        return [RemoteVector(self._names, [(PARAMS, 1.0)])]

    def _set_param(self, params_data: Sequence[RemoteVector]) -> None:
        self._names.combine(PARAMS, [(params_data[0].name, 1.0)])
