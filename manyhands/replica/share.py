"""A worker's part of one step: which batches it computes, and how its gradients are weighted."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # strategies import this file, and the launcher imports strategies
    from torch import Tensor

Results = list[tuple[Any, int]]
"""What the loss function returned for each batch, without gradients, with the batch's number of samples."""


class MadePlace(enum.Enum):
    """Where gradients are that were computed before the step."""

    WORKER = enum.auto()
    """Some workers have them, and what they bring is added up."""
    WORKERS = enum.auto()
    """All workers of the host have the sum: each brings what it owns of it."""
    HOST = enum.auto()
    """The sum is in the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """Gradients that a worker has computed before the step."""

    gradients: Mapping[int, Tensor]
    """By the parameter's id."""
    loss: float | None
    """None where only the script knows it."""
    is_weighted: bool = False
    """Whether they are weighted by samples already, and all workers have the same."""
    place: MadePlace = MadePlace.WORKER

    def share_of(self, rank: int, ranks: Sequence[int]) -> Made:
        """What one of the workers with these gradients brings to their sum, so that each comes once."""
        mine, count = ranks.index(rank), len(ranks)
        own = {key: grad for at, (key, grad) in enumerate(self.gradients.items()) if at % count == mine}
        return replace(self, gradients=own)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Batches with their numbers of samples, and the samples that weigh them."""

    parts: Iterable[tuple[Any, int]]
    """Where this is no sequence, the batches come one by one, and their number is not known before."""
    samples: int
    """In all batches."""
    total: Callable[[], float]
    """Asked for after the forward pass: by then all workers have said how many samples they have."""
    of_replica: Callable[[], float] = lambda: 0.0
    """Asked for like `total`: the samples of the workers of this replica."""
    results: Results = field(default_factory=list)
    """What the loss function returned for the batches, as they are computed."""
    made: Made | None = None
    """In place of batches."""
