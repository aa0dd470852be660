"""Gradients of layers that are pushed every few steps only (Nexus): they wait here, and what goes is their mean."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mean:
    """What is pushed of a group for several steps."""

    gradient: Tensor | None  # None: there was none in any of them
    missing: set[int]  # parameters that got no gradient in any of them
    seen: int  # the group's version on which the first was computed


@dataclass(frozen=True, kw_only=True)
class DeferredGradients:
    """What there is of some steps."""

    steps: int = 0
    total: Tensor | None = None
    missing: frozenset[int] = frozenset()
    seen: int = 0


class Deferral:
    """The gradients of one group since its last push; of a table, those of some rows."""

    def __init__(self, kept: DeferredGradients | None = None) -> None:
        self._kept = self._before = kept or DeferredGradients()

    @property
    def kept(self) -> DeferredGradients:
        return self._kept

    @property
    def steps(self) -> int:
        return self._kept.steps

    def wait_for(self, steps: int) -> None:
        """Others have kept back so many: those that are missing here were empty."""
        self._kept = self._before = replace(self._kept, steps=steps)

    def settle(self) -> None:
        """The step is made: it will not be taken back any more."""
        self._before = self._kept

    def take_back(self) -> None:
        """The step will be made again."""
        self._kept = self._before

    def add(self, gradient: Tensor | None, missing: set[int], seen: int) -> None:
        """One more step; None where this worker had no samples in it."""
        kept, total, lacks = self._kept, self._kept.total, self._kept.missing
        if gradient is not None and total is not None:
            lacks, total = lacks & missing, total + gradient  # not in place: it may be taken back
        elif gradient is not None:
            lacks, total = frozenset(missing), gradient.clone()
        self._kept = DeferredGradients(
            steps=kept.steps + 1, total=total, missing=lacks, seen=kept.seen if kept.steps else seen
        )

    def take(self) -> Mean:
        """What there is, and begin anew."""
        kept, self._kept = self._kept, DeferredGradients()
        return Mean(
            gradient=None if kept.total is None else kept.total / kept.steps,
            missing=set(kept.missing),
            seen=kept.seen,
        )
