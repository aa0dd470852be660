"""Ring (Patarasuk & Yuan 2009; Baidu 2017; Horovod, Sergeev & Del Balso 2018)."""

from collections.abc import Sequence

from manyhands.comm.collectives.schedule import (
    Hosts,
    Round,
    Schedule,
    Transfer,
    neighbours_first,
    reduce_and_return,
)


def ring(size: int, hosts: Hosts | None = None) -> Schedule:
    """Each rank talks to its two neighbours only and sends 2(N−1)/N of the vector (Baidu 2017; Horovod 2018).

    Fewest bytes per rank for every N, but 2(N−1) rounds, so small vectors pay for latency. The ring visits
    host after host and enters each once. Sums return against the direction in which they were collected.
    """
    ranks = neighbours_first(size, hosts)
    shares = [range(part, part + 1) for part in range(size)]
    return reduce_and_return(size, size, reduce_scatter(ranks, shares))


def reduce_scatter(ranks: Sequence[int], shares: Sequence[range]) -> list[Round]:
    """Sum `shares[i]` over all ranks at `ranks[i]`: it sets out just behind its owner and goes once round."""
    count = len(ranks)
    return [
        tuple(
            Transfer(ranks[place], ranks[(place + 1) % count], shares[(place - lap) % count], reduce=True)
            for place in range(count)
        )
        for lap in range(1, count)
    ]
