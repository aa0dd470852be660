"""Vectors that a server keeps for an optimizer that runs on a worker: the server has its part of each."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.servers.protocol.consistency import OutOfTurn
from manyhands.servers.protocol.messages import BEFORE, GRADIENT, PARAMS


class Vectors:
    """By name, the parts that this server owns, one for each group; at first only those of the parameters.

    The parameters lie where the workers read them; the parameters before a step lie in `before`, if given, where a
    server that takes over finds them.
    """

    def __init__(self, params: Mapping[int, Tensor], before: Mapping[int, Tensor] | None = None) -> None:
        self._order = {group: number for number, group in enumerate(params)}
        self._homes = {PARAMS: list(params.values())}
        if before:
            self._homes[BEFORE] = list(before.values())
        self._parts = {PARAMS: self._homes[PARAMS]}

    def add(self, group: int, gradient: Tensor) -> None:
        """Add a worker's gradient to that of the evaluation."""
        self._found(GRADIENT)[self._order[group]].add_(gradient)

    def combine(self, name: str, terms: Sequence[tuple[str, float]]) -> None:
        """A vector, known or not yet, becomes Σ factor · vector."""
        largest = torch.finfo(self._parts[PARAMS][0].dtype).max if self._parts[PARAMS] else math.inf
        if any(math.isfinite(factor) and abs(factor) > largest for _, factor in terms):
            raise OutOfTurn("a factor that the vector's type cannot hold")
        made = (
            self._start(name, *terms[0])
            if terms
            else [torch.zeros_like(part) for part in self._parts[PARAMS]]
        )
        for other, factor in terms[1:]:
            for into, part in zip(made, self._found(other), strict=True):
                into.add_(part, alpha=factor)
        home = self._homes.get(name)
        for into, part in zip(home or [], made, strict=False):
            into.copy_(part)
        self._parts[name] = home or made

    def _start(self, name: str, first: str, factor: float) -> list[Tensor]:
        """The first term, in place if the vector only gets something added."""
        parts = self._found(first)
        return parts if name == first and factor == 1 else [part * factor for part in parts]

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            if name != PARAMS:
                self._parts.pop(name, None)

    def recall(self, name: str) -> None:
        """Use a vector that a dead server has left."""
        self._parts[name] = self._homes[name]

    def begin_anew(self, *, takes_back: bool) -> None:
        """Forget all vectors but the parameters; with `takes_back` these become what they were before the step."""
        if takes_back and BEFORE in self._parts:
            self.combine(PARAMS, [(BEFORE, 1.0)])
        self._parts = {PARAMS: self._parts[PARAMS]}

    def measure(self, kind: str, one: str, other: str) -> float:
        pairs = list(zip(self._found(one), self._found(other), strict=True))
        if kind == "dot":
            return sum(float(a.dot(b)) for a, b in pairs)
        if kind == "magnitudes":
            return sum(float(a.abs().sum()) for a, _ in pairs)
        if kind == "largest":
            return max((float(a.abs().max()) for a, _ in pairs), default=0.0)
        raise OutOfTurn(f"no measure {kind!r}")

    def _found(self, name: str) -> list[Tensor]:
        if name not in self._parts:
            raise OutOfTurn(f"no vector {name!r}")
        return self._parts[name]
