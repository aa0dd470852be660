"""A vector in blocks of equal length, and a shorter one at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def block_count(length: int, block: int) -> int:
    return -(-length // block)


def in_blocks(vector: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Matrices with a row for each block, and which blocks these are: all whole ones, and the rest."""
    whole = vector.numel() // block
    if whole:
        yield slice(0, whole), vector[: whole * block].view(whole, block)
    if vector.numel() > whole * block:
        yield slice(whole, whole + 1), vector[whole * block :].view(1, -1)
