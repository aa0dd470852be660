"""Where to cut: stages whose slowest is as fast as can be, what crosses a cut included."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

BYTES_PER_S = 2e9  # into the memory of a host and out of it again


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured of each operation, and of the place after it."""

    seconds: Sequence[float]  # forward and backward
    crossing_bytes: Sequence[int]  # of what is still needed after it
    allowed: Sequence[bool]  # whether the model may be cut after it
    trained: Sequence[bool]  # whether it has parameters: every stage needs some


def balanced(costs: Costs, stages: int) -> list[int] | None:
    """How many operations lie before each cut; None where there are not enough places to cut at.

    Dynamic programming over (stages, where the last of them ends): the least that the slowest stage takes.
    """
    count = len(costs.seconds)
    edges = [0, *(index + 1 for index in range(count - 1) if costs.allowed[index]), count]
    sums = [0.0]
    for seconds in costs.seconds:
        sums.append(sums[-1] + seconds)
    counts = [0, *itertools.accumulate(map(int, costs.trained))]

    def passing(edge: int) -> float:
        """A value goes one way and its gradient the other."""
        return 2 * costs.crossing_bytes[edge - 1] / BYTES_PER_S if 0 < edge < count else 0.0

    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for stop in edges[1:]:
            for start, (slowest, cuts) in best.items():
                if counts[start] < counts[stop]:
                    cost = max(slowest, sums[stop] - sums[start] + passing(start) + passing(stop))
                    if stop not in following or cost < following[stop][0]:
                        following[stop] = (cost, [*cuts, stop])
        best = following
    return best[count][1][:-1] if count in best else None
