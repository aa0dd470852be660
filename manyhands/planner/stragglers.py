"""The slowest of many: what workers wait for who meet.

From m measured steps x_(1) ≤ … ≤ x_(m), the mean of the largest of n is  Σ_j x_(j) [(j/m)ⁿ − ((j−1)/m)ⁿ],  as long as
n is well below m; beyond that the tail is fitted (exponential above the upper quartile), since m steps have never seen
what happens once in n. Workers that meet every h steps wait for the largest of n sums of h steps: the spread of a mean
of h is that of one ÷ √h, except for what slows a step so rarely that it does not average out.
"""

from functools import lru_cache
from math import log, sqrt

TAIL = 0.75
"""The quantile above which the tail is fitted."""


@lru_cache(maxsize=65536)
def slowest(jitter: tuple[float, ...], workers: int, steps: float = 1.0) -> float:
    """The mean of the largest of so many workers' time for so many steps ÷ the mean time of one."""
    if workers <= 1 or len(jitter) < 2:
        return 1.0
    mean = sum(jitter) / len(jitter)
    return 1.0 + (expected_largest(jitter, workers) / mean - 1.0) / sqrt(max(1.0, steps))


@lru_cache(maxsize=4096)
def expected_largest(jitter: tuple[float, ...], count: int) -> float:
    """Of so many draws."""
    ordered = sorted(jitter)
    size = len(ordered)
    if count <= size / 3:
        return _empirical(ordered, count)
    at = _empirical(ordered, max(1, size // 3))
    # An exponential tail: the largest of n grows by its scale with every e-fold of n.
    start = ordered[int(TAIL * (size - 1))]
    above = [each - start for each in ordered if each > start]
    scale = sum(above) / len(above) if above else 0.0
    return at + scale * log(count / max(1, size // 3))


def _empirical(ordered: list[float], count: int) -> float:
    size = len(ordered)
    return sum(
        each * ((place / size) ** count - ((place - 1) / size) ** count)
        for place, each in enumerate(ordered, 1)
    )
