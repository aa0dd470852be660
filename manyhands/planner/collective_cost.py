"""What a sum by a schedule costs: Σ over rounds of the slowest link's (α + bytes · β + added bytes · γ).

The schedules are data, so any of them is priced, also one that is new. With N hosts of one worker and S bytes

    ring                2(N−1)·α + 2(N−1)/N·S·β + (N−1)/N·S·γ
    tree                2⌈log₂N⌉·(α + S·β) + ⌈log₂N⌉·S·γ
    halving-doubling    2·log₂N·α + 2(N−1)/N·S·β + (N−1)/N·S·γ      N a power of two

which are its tests. Vectors pass as stripes that follow each other through the rounds (`executor.py`): the first fills
the rounds, and the rest takes as long as the link with most bytes.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from manyhands.comm.collectives import TOPOLOGIES
from manyhands.comm.collectives.executor import PIECE_BYTES, SIDE_BY_SIDE
from manyhands.comm.collectives.schedule import Round, Schedule
from manyhands.planner.amounts import Amount

LARGEST_SCHEDULE = 128
"""Ranks; larger ones follow from those with a quarter, a half and all of so many: straight, or as log N."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a schedule asks of the links, as counts and as shares of the vector."""

    rounds: float = 0.0
    """In which something crosses between hosts."""
    crossing: float = 0.0
    """Σ over these rounds of the largest share that leaves or enters one host."""
    busiest: float = 0.0
    """The largest share that leaves or enters one host over all rounds."""
    added: float = 0.0
    """Σ over all rounds of the largest share that one rank adds up."""
    inner_rounds: float = 0.0
    """In which something passes inside hosts, and nothing between them."""
    inner: float = 0.0
    """Σ over rounds that stay inside hosts of the largest share that one rank takes."""
    largest: float = 1.0
    """The longest message."""


def seconds(
    demand: Demand,
    size_bytes: float,
    *,
    latency_s: Amount,
    s_per_byte: Amount,
    add_s: Amount,
    inner_s: Amount,
    meeting_s: Amount = 0.0,
) -> Amount:
    """Of one sum of so many bytes; `inner_s` is per byte that passes through a host's memory, and `meeting_s` what it
    takes until a worker of the host sees that something is there: in every round, however little that is."""
    stripes = max(1.0, size_bytes * demand.largest / (PIECE_BYTES * SIDE_BY_SIDE))
    through = demand.crossing * s_per_byte + demand.added * add_s + demand.inner * inner_s
    steady = demand.busiest * s_per_byte + demand.added * add_s + demand.inner * inner_s
    return (
        demand.rounds * latency_s
        + demand.inner_rounds * meeting_s
        + through * (size_bytes / stripes)
        + steady * (size_bytes * (stripes - 1) / stripes)
    )


def native_ring(hosts: int) -> Demand:
    """Between hosts that share replicas, or after each has added up its own: the library's ring."""
    if hosts == 1:
        return Demand()
    share = (hosts - 1) / hosts
    return Demand(
        rounds=2 * (hosts - 1),
        crossing=2 * share,
        busiest=2 * share,
        added=share,
        largest=1 / hosts,
    )


@lru_cache
def demand_of(topology: str, hosts: int, each: int) -> Demand:
    """Of a named topology among so many hosts with so many ranks each."""
    most = max(1, LARGEST_SCHEDULE // each)
    if hosts <= most:
        size = hosts * each
        if size == 1:
            return Demand()
        ranks = [range(host * each, (host + 1) * each) for host in range(hosts)]
        return _demand(TOPOLOGIES[topology](size, ranks), each)
    most = 1 << (most.bit_length() - 1)
    at = (max(1, most // 4), max(1, most // 2), most)
    return _grown([demand_of(topology, count, each) for count in at], at, hosts)


def _grown(known: list[Demand], at: tuple[int, ...], hosts: int) -> Demand:
    """What grows equally with every doubling is a logarithm; what doubles its growth is straight; a share that stops
    growing is what it was."""
    found = {}
    for name in Demand.__dataclass_fields__:
        first, second, third = (getattr(each, name) for each in known)
        growth, before = third - second, second - first
        if at[0] == at[2] or abs(growth) < 1e-9:
            found[name] = third
        elif name == "largest":
            found[name] = third * at[2] / hosts if third < second else third
        elif growth > 1.5 * before > 0:
            found[name] = third + growth * (hosts - at[2]) / (at[2] - at[1])
        elif growth < 0.75 * before:
            found[name] = third + growth * (1 - at[2] / hosts)  # as 1 − 1/N
        else:
            found[name] = third + growth * ceil(log2(hosts / at[2]))
    return Demand(**found)


def _demand(schedule: Schedule, each: int) -> Demand:
    total: defaultdict[str, float] = defaultdict(float)
    link: defaultdict[tuple[str, int], float] = defaultdict(float)
    largest = 0.0
    for transfers in schedule.rounds:
        here = _of_round(transfers, schedule.parts, each)
        crossing = max((share for (kind, _), share in here.items() if kind in ("out", "in")), default=0.0)
        inner = max((share for (kind, _), share in here.items() if kind == "inner"), default=0.0)
        total["rounds"] += crossing > 0
        total["crossing"] += crossing
        total["inner_rounds"] += inner > 0 and not crossing
        total["inner"] += inner
        total["added"] += max((share for (kind, _), share in here.items() if kind == "added"), default=0.0)
        for (kind, host), share in here.items():
            if kind in ("out", "in"):
                link[kind, host] += share
        largest = max([largest, *(len(one.parts) / schedule.parts for one in transfers)])
    return Demand(busiest=max(link.values(), default=0.0), largest=largest, **total)


def _of_round(transfers: Round, parts: int, each: int) -> dict[tuple[str, int], float]:
    """Shares of the vector: what leaves and enters each host, what ranks take inside, what they add."""
    found: defaultdict[tuple[str, int], float] = defaultdict(float)
    for one in transfers:
        share = len(one.parts) / parts
        source, target = one.source // each, one.target // each
        if source == target:
            found["inner", one.target] += share
        else:
            found["out", source] += share
            found["in", target] += share
        if one.reduce:
            found["added", one.target] += share
    return found
