"""One update of a group: the gradients that workers pushed for it, their weighted sum, and its norm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.replica.layout import Place, Span
from manyhands.servers.protocol.consistency import Clocks
from manyhands.servers.protocol.messages import Push
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.rows import as_table, gradient_of, touched, unpack


@dataclass(frozen=True)
class PushedGradient:
    """A push with its gradient: a group's vector, or rows of a table; None if the worker has nothing to add."""

    push: Push
    vector: Tensor | None


class GroupUpdate:
    """The gradients of some workers for one group; `clocks` are those under which the workers pushed them."""

    def __init__(
        self, group: SpanGroup, workers: Sequence[int], gradients: Sequence[PushedGradient], clocks: Clocks
    ) -> None:
        self.group = group
        self.workers = workers
        self.gradients = gradients
        self.clocks = clocks
        full = [gradient for gradient in gradients if gradient.vector is not None]
        # The optimizer skips a parameter for which no worker has a gradient.
        missing = [frozenset(gradient.push.missing) for gradient in full]
        self.skipped: frozenset[int] = frozenset.intersection(*missing) if missing else frozenset()
        self.given = [gradient.vector for gradient in full if gradient.vector is not None]
        samples = [gradient.push.samples for gradient in full]
        self.weights = [own / sum(samples) if clocks.rule.weighs else 1.0 for own in samples]

    @property
    def team(self) -> int:
        return self.clocks.team(self.workers[0])

    def parts(self, span: Span) -> list[Tensor]:
        if self.group.table:
            return self.given  # a block of a table is one span
        inside = slice(span.start - self.group.start, span.stop - self.group.start)
        return [vector[inside] for vector in self.given]


class GradientReader:
    """Finds the gradient of a push: in the message, or in the host's memory at `local_grads(worker)`."""

    def __init__(self, groups: Mapping[int, SpanGroup], local_grads: Callable[[int], Tensor]) -> None:
        self._groups = groups
        self._local_grads = local_grads

    def vector(self, worker: int, group: int, payload: Tensor | None) -> Tensor:
        return self._local_grads(worker)[self._groups[group].slice] if payload is None else payload

    def gradient(self, worker: int, push: Push, payload: Tensor | None) -> PushedGradient:
        if not push.samples:
            return PushedGradient(push, None)
        vector, table = self.vector(worker, push.group, payload), self._groups[push.group].table
        if table is None:
            return PushedGradient(push, vector)
        numbers = touched(vector, table) if push.rows is None else unpack(push.rows, table)
        if push.rows is not None and payload is not None:
            rows = payload.view(-1, table.columns)
        else:
            rows = as_table(vector, table)[numbers]
        return PushedGradient(push, gradient_of(numbers, rows, table))

    def local_update(
        self, group: SpanGroup, pushes: Sequence[tuple[int, Push]], clocks: Clocks
    ) -> GroupUpdate:
        """An update from gradients that all lie in the host's memory."""
        gradients = [self.gradient(worker, push, None) for worker, push in pushes]
        return GroupUpdate(group, [worker for worker, _ in pushes], gradients, clocks)


class GradientSum:
    """Adds up the gradients of an update, span by span, in a buffer that stays in the cache."""

    def __init__(self, groups: Mapping[int, SpanGroup], places: Sequence[Place], dtype: torch.dtype) -> None:
        longest = max((span.stop - span.start for g in groups.values() for span in g.spans), default=0)
        self._buffer = torch.empty(longest, dtype=dtype)
        self._places = places

    def of(self, update: GroupUpdate, span: Span, factor: float = 1.0) -> Tensor:
        """The weighted sum in the order of the workers, times `factor`.

        The gradients themselves stay as they are: a server that takes over may have to add them up again.
        """
        total = self._added(update, span)
        if factor == 1.0 or total.is_sparse:
            return total if factor == 1.0 else total * factor
        return torch.mul(total, factor, out=self._buffer[: len(total)])

    def _added(self, update: GroupUpdate, span: Span) -> Tensor:
        first, *others = update.parts(span)
        unit, *weights = update.weights
        if not others:
            return first  # alone, so its weight is 1
        if first.is_sparse:
            total = first if unit == 1.0 else first * unit
            for part, weight in zip(others, weights, strict=True):
                total = torch.add(total, part, alpha=weight)
            return total.coalesce()
        total = torch.add(first, others[0], alpha=weights[0] / unit, out=self._buffer[: len(first)])
        for part, weight in zip(others[1:], weights[1:], strict=True):
            total.add_(part, alpha=weight / unit)
        return total if unit == 1.0 else total.mul_(unit)

    def square(self, update: GroupUpdate) -> float:
        """The square of the norm of the sum, without the parameters that the optimizer skips."""
        square = 0.0
        for span in update.group.spans if update.given else ():
            total = self._added(update, span)
            for index in set(span.places) - update.skipped:
                place = self._places[index]
                start, stop = max(place.start, span.start), min(place.stop, span.stop)
                part = total.values() if total.is_sparse else total[start - span.start : stop - span.start]
                square += float(torch.linalg.vector_norm(part)) ** 2
        return square
