"""Binomial tree (FireCaffe, Iandola et al. 2016)."""

from collections.abc import Sequence

from manyhands.comm.collectives.schedule import (
    Hosts,
    Round,
    Schedule,
    Transfer,
    neighbours_first,
    reduce_and_return,
)


def tree(size: int, hosts: Hosts | None = None) -> Schedule:
    """Reduce along a binomial tree and broadcast back, 2·⌈log2 N⌉ rounds (FireCaffe, Iandola 2016).

    Few rounds, so it suits small vectors; whole vectors travel, so large ones pay for bandwidth. Neighbours
    join first, so most of the traffic stays inside hosts.
    """
    rounds, _ = fold(neighbours_first(size, hosts), keep=1, parts=range(1))
    return reduce_and_return(size, 1, rounds)


def fold(ranks: Sequence[int], keep: int, parts: range) -> tuple[list[Round], list[int]]:
    """Neighbours join in pairs until `keep` ranks hold the sums of all; also says which ranks those are."""
    ranks, rounds = list(ranks), []
    while len(ranks) > keep:
        pairs = min(len(ranks) // 2, len(ranks) - keep)
        kept, given = ranks[0 : 2 * pairs : 2], ranks[1 : 2 * pairs : 2]
        rounds.append(
            tuple(
                Transfer(giver, keeper, parts, reduce=True) for keeper, giver in zip(kept, given, strict=True)
            )
        )
        ranks = kept + ranks[2 * pairs :]
    return rounds, ranks
