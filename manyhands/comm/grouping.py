"""How the workers of a host divide into groups; the launcher reads this too, so it imports no torch."""

from collections.abc import Sequence


def grouped(host: Sequence[int], workers: int, groups: int | None) -> list[Sequence[int]]:
    """The workers of a host, in order, in groups that differ by at most one worker.

    A group lies inside one host. A host forms its part of the `groups` of all workers, at least one
    and at most one for each of its workers; without `groups` it is one group.

    >>> grouped(range(5), 5, 2)
    [range(0, 2), range(2, 5)]
    """
    size = len(host)
    count = 1 if groups is None else max(1, min(size, groups * size // workers))
    return [host[size * group // count : size * (group + 1) // count] for group in range(count)]
