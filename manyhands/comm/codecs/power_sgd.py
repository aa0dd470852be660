"""A matrix as the product of two thin ones (PowerSGD, Vogels, Karimireddy & Jaggi 2019).

With M_h the gradient of host h, and what it has left out before, one step of the power method finds the main directions
of the sum M = Σ M_h, from those of the step before:

    P ← orthonormal(Σ M_h Q),    Q_h ← M_hᵀ P,    Q ← Σ Q_h,    M ≈ P Qᵀ,    M_h − P Q_hᵀ is left out

Both sums are linear, so hosts exchange thin matrices only, in two sums of which the second needs the first. There is no
message for a vector, as other codecs have it: `low_rank.py` makes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyhands.comm.codecs.codec import Codec
from manyhands.errors import UsageError

_TYPICAL_ELEMENTS = 1 << 18  # of a span, as a square


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Codec):
    """Thin factors of the sum, 0.5 bits an element at rank 4, error feedback (PowerSGD, Vogels et al. 2019)."""

    is_low_rank: ClassVar[bool] = True
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"rank={self.rank}: it must be at least 1")

    def size_bytes(self, length: int) -> int:
        """Of a square matrix; what travels depends on the shapes."""
        sides = 2 * int(min(length, _TYPICAL_ELEMENTS) ** 0.5)
        return int(4 * self.rank * sides * max(1.0, length / _TYPICAL_ELEMENTS))
