"""Gradients of layers that are pushed every few steps only (Nexus): they wait here, and what goes is their mean."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mean:
    """What is pushed of a group for several steps."""

    gradient: Tensor | None  # None: there was none in any of them
    missing: set[int]  # parameters that got no gradient in any of them
    seen: int  # the group's version on which the first was computed


class KeptBack:
    """The gradients of one group since its last push; of a table, those of some rows."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.steps = 0
        self._total: Tensor | None = None
        self._missing: set[int] = set()
        self._seen = 0

    def add(self, gradient: Tensor | None, missing: set[int], seen: int) -> None:
        """One more step; None where this worker had no samples in it."""
        if not self.steps:
            self._seen = seen
        self.steps += 1
        if gradient is None:
            return
        if self._total is None:
            self._total, self._missing = gradient.clone(), missing
        else:
            self._total = self._total + gradient if gradient.is_sparse else self._total.add_(gradient)
            self._missing &= missing

    def take(self) -> Mean:
        """What there is, and begin anew."""
        mean = Mean(
            gradient=None if self._total is None else self._total / self.steps,
            missing=self._missing,
            seen=self._seen,
        )
        self._begin()
        return mean
