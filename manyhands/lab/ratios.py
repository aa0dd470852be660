"""Ratios of contenders that had their turns in the same rounds, with intervals by bootstrap.

A ratio is taken round by round, because what the machine does in a round it does to all contenders: between separate
windows of a second two figures of a busy machine differ by a third, in the same rounds by a thirtieth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class RatioInterval:
    """The median of the ratios of the rounds, and between which values it is for all that is known."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired(
    ours: Sequence[float], theirs: Sequence[float], *, confidence: float = 0.9, seed: int = 0
) -> RatioInterval:
    """Ours ÷ theirs of rounds that both have had, the first with the first: rounds are drawn again, with both."""
    each = _log_ratios(ours, theirs)
    medians = np.median(each[draw_again(len(each), DRAWS, seed)], axis=1)
    outside = (1 - confidence) / 2
    low, high = np.quantile(medians, [outside, 1 - outside])
    return RatioInterval(
        median=math.exp(float(np.median(each))),
        low=math.exp(float(low)),
        high=math.exp(float(high)),
        rounds=len(each),
    )


def by_rank(ours: Sequence[float], theirs: Sequence[float], *, confidence: float) -> tuple[float, float]:
    """As above, the interval by the sign test: exact however few rounds there are, where a bootstrap is too sure.

    Between the k-th smallest and the k-th largest ratio lies the median, but for P(fewer than k of n coins are heads)
    on either side. Of too few rounds it is everything.
    """
    each = np.sort(_log_ratios(ours, theirs))
    count, tail, outside = len(each), 0.0, (1 - confidence) / 2
    k = 0
    while k < count and (tail := tail + math.comb(count, k) / 2**count) <= outside:
        k += 1
    if not k:
        return 0.0, math.inf
    return math.exp(float(each[k - 1])), math.exp(float(each[count - k]))


def scatter(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How far the ratio of one round is from their median, as a factor less 1: that of two rounds in three."""
    each = _log_ratios(ours, theirs)
    return float(np.expm1(1.4826 * np.median(np.abs(each - np.median(each)))))


def draw_again(count: int, draws: int, seed: int) -> np.ndarray:
    """For each bootstrap draw, which of so many rounds it has."""
    return np.random.default_rng(seed).integers(0, count, size=(draws, count))


def _log_ratios(ours: Sequence[float], theirs: Sequence[float]) -> np.ndarray:
    both = min(len(ours), len(theirs))
    logs: np.ndarray = np.log(np.asarray(ours[:both], dtype=float)) - np.log(
        np.asarray(theirs[:both], dtype=float)
    )
    return logs
