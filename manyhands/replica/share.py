"""A worker's part of one step: which batches it computes, and how its gradients are weighted."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Share:
    """Batches with their numbers of samples, and the samples that weigh them."""

    parts: Iterable[tuple[Any, int]]
    """Where this is no sequence, the batches come one by one, and their number is not known before."""
    samples: int
    """In all batches."""
    total: Callable[[], float]
    """Asked for after the forward pass: by then all workers have said how many samples they have."""
