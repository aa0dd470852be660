"""A version that answers: what requests are handed to."""

import math
from dataclasses import dataclass

from manyhands.serving.description import Description
from manyhands.serving.stream import ModelVersion

FAILURES_IN_A_ROW = 3
"""After so many requests that a version could not answer it is sent away, if another can take its place."""


@dataclass(eq=False, kw_only=True)
class Servable:
    """One loaded version, and how it is doing."""

    version: ModelVersion
    handle: int
    form: Description
    accuracy: float | None = None
    load_s: float = 0.0
    in_flight: int = 0
    failures_in_a_row: int = 0

    def answered(self, *, well: bool) -> None:
        self.in_flight -= 1
        self.failures_in_a_row = 0 if well else self.failures_in_a_row + 1

    @property
    def is_healthy(self) -> bool:
        return self.failures_in_a_row < FAILURES_IN_A_ROW


def least_accuracy(before: Servable | None, most_drop: float) -> float:
    """Below which a new version is not served, given the one that is."""
    if before is None or before.accuracy is None:
        return -math.inf
    return before.accuracy - most_drop
