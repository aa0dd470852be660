"""What a script gave to one step."""

from dataclasses import dataclass, field
from typing import Any

from manyhands.data.ledger import Ranges
from manyhands.engine.feed import Feed
from manyhands.replica.share import Made, Results


@dataclass(frozen=True, slots=True)
class StepInput:
    parts: list[tuple[Any, int]]
    """Batches, each with its number of samples."""
    samples: int
    batches: int
    places: list[tuple[Feed, Ranges]]
    """Where the samples lie in the order of the epoch, for each stream that they are of."""
    made: Made | None = None
    """In place of batches: gradients that were computed before."""
    counted: int = 0
    """Samples of all workers that were counted when those gradients were computed."""
    results: Results = field(default_factory=list)
    """What the loss function returned for each batch."""
    weight: float | None = None
    """Of a loss that the script has computed, what it counts; a sum of weights is no whole number."""

    @property
    def counts(self) -> float:
        """What its mean counts beside those of other workers."""
        return self.samples if self.weight is None else self.weight


NO_WORK = StepInput([], 0, 0, [])
