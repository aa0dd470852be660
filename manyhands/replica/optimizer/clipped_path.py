"""Updates by a gradient whose norm is limited, as `torch.nn.utils.clip_grad_norm_` does it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from manyhands.replica.flat_model import FlatModel
from manyhands.replica.gradients.of_all_hosts import GradientsOfHosts
from manyhands.replica.layout import Span
from manyhands.replica.memory import Team
from manyhands.replica.optimizer.updates import Evaluate, Factor, UpdatePath, unlimited
from manyhands.replica.parameters import in_type

_TINY = 1e-6  # as `clip_grad_norm_` has it


Norm = TypeVar("Norm", float, Tensor)


def clip_factor(limit: float, norm: Norm) -> Norm:
    """By what a gradient of that norm is to be multiplied."""
    factor = limit / (norm + _TINY)
    return factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(1.0, factor)


def _finite_factor(limit: float, norm: Tensor) -> Tensor:
    """The same; NaN where the norm is not finite."""
    return torch.where(torch.isfinite(norm), clip_factor(limit, norm), torch.nan)


def norm_of(norms: Sequence[Tensor]) -> Tensor:
    """The norm of the parameters' norms; in the model's order, one worker gets the very bits of plain PyTorch."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros(())


Agree = Callable[[Tensor], None]


class ClippedPath(UpdatePath):
    """Another path, whose updates wait until the norm of all gradients is known."""

    def __init__(
        self,
        inner: UpdatePath,
        limit: float,
        flat: FlatModel,
        gradients: GradientsOfHosts,
        team: Team,
        agree: Agree | None,
    ) -> None:
        """`agree` makes a vector of the first replica everyone's, where all replicas take the same step."""
        self.inner = inner
        super().__init__(inner.updates, gradients, inner.gate)
        self._gradients: GradientsOfHosts = gradients
        self.is_logged = inner.is_logged
        self._team = team
        self._limit = limit
        self._layout = flat.layout
        self._part = flat.part
        self._types = flat.types
        self._agree = agree
        self._norms = _vector(flat, len(flat.layout.places) + 1)  # and, last, the norm of them all
        self._deferred: list[Span] = []
        self._is_due = False

    @property
    def skipped(self) -> frozenset[int]:
        return self.inner.skipped

    @skipped.setter
    def skipped(self, skipped: frozenset[int]) -> None:
        self.inner.skipped = skipped

    def open(self) -> None:
        self._deferred.clear()
        self._is_due = True
        self.inner.open()

    def apply(self, span: Span) -> None:
        self._gradients.complete(span)
        self._deferred.append(span)  # the norm needs all of them

    def apply_all(self, spans: Iterable[Span]) -> None:
        super().apply_all(spans)
        self._is_due = True
        self._apply_deferred()

    def settle(self) -> None:
        self._apply_deferred()
        self.inner.settle()

    def _apply_deferred(self) -> None:
        if self._is_due:
            self._is_due = False
            factor = self._factor()
            self.is_finite = not bool(torch.isnan(factor))
            for span in self._deferred if self.is_finite else ():
                self.inner.make(span, self._gradients.total[span.slice] * factor)
            self._deferred.clear()

    def minimize(self, evaluate: Evaluate) -> float:
        return self.inner.minimize(evaluate)

    def limit(self, grads: Tensor) -> None:
        self._is_due = False
        grads.mul_(self._factor())

    def recover(self, dead: Collection[int], attempt: int, factor: Factor = unlimited) -> int:
        return self.inner.recover(dead, attempt, self._recovered_factor)

    def _factor(self) -> Tensor:
        """From the norms of the parameters, each taken by one worker of the team."""
        team, total, norm = self._team, self._gradients.total, self._norms[-1:]
        team.barrier()
        for index, place in enumerate(self._layout.places):
            is_mine = index % team.size == team.index and index not in self.skipped
            if is_mine and self._part.counts(place.name):
                # As its parameter gets it: rounded, and not finite where that type does not reach as far.
                own = in_type(total[place.start : place.stop], self._types[index])
                self._norms[index] = torch.linalg.vector_norm(own.to(total.dtype))
        team.barrier()
        if team.index == 0:
            norm.copy_(self._norm_of(list(self._norms[:-1])))
            if self._agree:
                self._agree(norm)  # another processor may have rounded otherwise
        team.barrier()
        return _finite_factor(self._limit, self._part.whole_norm(norm[0]))

    def _recovered_factor(self) -> Tensor:
        """The same, by a survivor alone."""
        total = self._gradients.whole()
        norms = [torch.linalg.vector_norm(total[place.start : place.stop]) for place in self._layout.places]
        return _finite_factor(self._limit, self._norm_of(norms))

    def _norm_of(self, norms: Sequence[Tensor]) -> Tensor:
        return norm_of(
            [
                norms[index]
                for index, place in reversed(list(enumerate(self._layout.places)))
                if index not in self.skipped and self._part.counts(place.name)
            ]
        )


class ClippedInParts(ClippedPath):
    """The parts of a replica find the factor together, before the gate: behind it no part needs another."""

    def __init__(
        self,
        inner: UpdatePath,
        limit: float,
        flat: FlatModel,
        gradients: GradientsOfHosts,
        team: Team,
        agree: Agree | None,
    ) -> None:
        super().__init__(inner, limit, flat, gradients, team, agree)
        self._found = _vector(flat, 1)

    def open(self) -> None:
        self._found.copy_(super()._factor())
        super().open()

    def _factor(self) -> Tensor:
        return self._found

    def _recovered_factor(self) -> Tensor:
        return self._found


def _vector(flat: FlatModel, length: int) -> Tensor:
    """What the workers of a team have in common; gradients are there as well."""
    return flat.memory.gradients(length, flat.dtype.to_real())
