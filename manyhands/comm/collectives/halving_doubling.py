"""Recursive halving and doubling (Rabenseifner 2004; Thakur, Rabenseifner & Gropp 2005)."""

from collections.abc import Sequence

from manyhands.comm.collectives.schedule import (
    Hosts,
    Round,
    Schedule,
    Transfer,
    neighbours_first,
    reduce_and_return,
)
from manyhands.comm.collectives.tree import fold


def halving_doubling(size: int, hosts: Hosts | None = None) -> Schedule:
    """Partners exchange halves, then quarters, and so on and back (Rabenseifner 2004; Thakur 2005).

    The rounds of a tree and the bytes of a ring when N is a power of two. Otherwise some ranks first fold
    their whole vector into a neighbour's, which costs two more rounds.
    """
    power = 1 << size.bit_length() - 1
    folding, ranks = fold(neighbours_first(size, hosts), keep=power, parts=range(power))
    return reduce_and_return(size, power, folding + halving(ranks))


def halving(ranks: Sequence[int]) -> list[Round]:
    """Each rank keeps half of what it holds and gives the other half to its partner, down to one part."""
    count = len(ranks)
    held = [range(count)] * count
    rounds: list[Round] = []
    distance = 1  # the nearest partner first: it gets the largest message, and often shares the host
    while distance < count:
        halves = [(parts[: len(parts) // 2], parts[len(parts) // 2 :]) for parts in held]
        upper = [bool(place & distance) for place in range(count)]
        rounds.append(
            tuple(
                Transfer(ranks[place], ranks[place ^ distance], halves[place][not upper[place]], reduce=True)
                for place in range(count)
            )
        )
        held = [halves[place][upper[place]] for place in range(count)]
        distance *= 2
    return rounds
