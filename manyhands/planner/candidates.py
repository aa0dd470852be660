"""All ways that a job could be distributed on given hosts: registered strategies × placements × workers × servers."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyhands import placement as placements
from manyhands import strategies
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.errors import ManyhandsError
from manyhands.planner.facts import ClusterFacts, Facts, HostsOfKind, SplitFacts
from manyhands.planner.ways import HostSplit, Way, traits_of
from manyhands.strategies import Asked
from manyhands.strategies.interface import Strategy

FEW = 8
"""Hosts up to which every number of them is tried; beyond, powers of two and all."""

MOST_SPLITS, FEW_SPLITS = 6, 3
"""Of a host's splits that are tried with every strategy; fewer where hosts are of several kinds."""


@dataclass(frozen=True, kw_only=True)
class WayLimits:
    """What a person has fixed; None: the search is free."""

    strategy: str | None = None
    placement: str | None = None
    workers: int | None = None
    threads: int | None = None
    servers: int | None = None
    hosts: int | None = None
    optimizer: str | None = None
    """Its name in small letters, where it is known."""
    alike_only: bool = False
    """Only ways whose steps equal those of one process."""


def ways(facts: Facts, wanted: WayLimits) -> Iterator[Way]:
    """Every way that is allowed; whether it fits the memory is not asked here."""
    texts = strategy_texts(wanted)
    for hosts in layouts(facts, wanted):
        workers = sum(each.count * each.processes for each in hosts)
        if wanted.workers not in (None, workers):
            continue
        # One worker has nothing to exchange: all strategies are the first of the table.
        for text in texts if workers > 1 else texts[:1]:
            for placement in placement_texts(facts, wanted, workers):
                for servers in server_counts(text, workers, hosts, wanted):
                    way = Way(strategy=text, hosts=hosts, placement=placement, servers=servers)
                    if allowed(way, wanted):
                        yield way


def strategy_texts(wanted: WayLimits) -> list[str]:
    """Every registered strategy with its defaults, every preset that differs, and every topology."""
    if wanted.strategy is not None:
        return [strategies.describe(strategies.parse(wanted.strategy))]
    found = []
    for name, kind in strategies.STRATEGIES.items():
        found.append(name)
        if any(field.name == "topology" for field in dataclasses.fields(kind)):
            found += [f"{name}:topology={topology}" for topology in TOPOLOGIES]
    found += [strategies.describe(strategies.parse(name)) for name in strategies.PRESETS]
    return list(dict.fromkeys(text for text in found if _suits(text, wanted)))


def _suits(text: str, wanted: WayLimits) -> bool:
    strategy = strategies.parse(text)
    only = strategies.tuning(strategy).only_optimizer
    if only is not None and wanted.optimizer != only:
        return False
    return strategy.traits.synchronous or not wanted.alike_only


def placement_texts(facts: Facts, wanted: WayLimits, workers: int) -> list[str]:
    """Those that so many workers can form, and that the model's layers allow."""
    if wanted.placement is not None:
        return [wanted.placement]
    found = [placements.DEFAULT]
    if not facts.model.layers or workers == 1:
        return found
    for name, kind in placements.PLACEMENTS.items():
        if name != placements.DEFAULT:
            found += [f"{name}:{settings}" if settings else name for settings in _settings(kind, workers)]
    return found


def _settings(kind: type[placements.Placement], workers: int) -> list[str]:
    """Divisors of the workers for whatever counts parts of a replica."""
    counted = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name in ("stages", "ways", "shards", "pipeline", "tensor")
    ]
    parts = [each for each in range(2, min(workers, 8) + 1) if workers % each == 0]
    found = []
    for values in itertools.product(parts, repeat=len(counted)):
        product = 1
        for value in values:
            product *= value
        if counted and workers % product == 0:
            found.append(",".join(f"{name}={value}" for name, value in zip(counted, values, strict=True)))
    return found


def server_counts(text: str, workers: int, hosts: Sequence[HostSplit], wanted: WayLimits) -> list[int]:
    """None for a strategy without servers; one, two, and one for each host otherwise."""
    if _traits_servers(text) is None:
        return [0]
    if wanted.servers:
        return [wanted.servers]
    return sorted({1, min(2, workers), min(workers, sum(each.count for each in hosts))})


def _traits_servers(text: str) -> object:
    return traits_of(text).servers


def layouts(facts: Facts, wanted: WayLimits) -> Iterator[tuple[HostSplit, ...]]:
    """Which hosts take part, and how each kind is cut: kinds join in the order in which the cluster names them."""
    cluster = facts.cluster
    for counts in _host_counts(cluster, wanted):
        choices = [
            [
                HostSplit(kind=kind.host.kind, count=count, processes=split.processes, threads=split.threads)
                for split in _splits(facts, kind, wanted)
            ]
            for kind, count in zip(cluster.hosts, counts, strict=True)
            if count
        ]
        yield from itertools.product(*choices)


def _host_counts(cluster: ClusterFacts, wanted: WayLimits) -> Iterator[tuple[int, ...]]:
    total = cluster.size
    sizes = [wanted.hosts] if wanted.hosts else host_sizes(total)
    for size in sizes:
        left, counts = min(size, total), []
        for kind in cluster.hosts:
            counts.append(min(left, kind.count))
            left -= counts[-1]
        yield tuple(counts)


def host_sizes(total: int) -> list[int]:
    if total <= FEW:
        return list(range(1, total + 1))
    return sorted({1 << power for power in range(total.bit_length())} | {total})


def _splits(facts: Facts, kind: HostsOfKind, wanted: WayLimits) -> list[SplitFacts]:
    """Those that compute fastest, and the one with fewest processes: no strategy makes up for a slow one."""
    usable = [
        split
        for split in kind.host.splits
        if not split.error and (wanted.threads is None or split.threads == wanted.threads)
    ]
    if wanted.workers is not None:
        return usable

    def pass_per_process(split: SplitFacts) -> float:
        cpu_s = split.pass_cpu_s.value + split.sample_cpu_s.value * facts.batch
        return split.wall_per_cpu.value * cpu_s / split.processes

    usable.sort(key=pass_per_process)
    kept = usable[: MOST_SPLITS if len(facts.cluster.hosts) == 1 else FEW_SPLITS]
    alone = [split for split in usable[len(kept) :] if split.processes == 1][:1]
    return kept + alone


def allowed(way: Way, wanted: WayLimits) -> bool:
    """Whether the run would not refuse it."""
    try:
        mesh = way.mesh
        strategy: Strategy = way.parsed
        asked = Asked(
            workers=mesh.replicas,
            servers=way.servers,
            optimizer=wanted.optimizer,
            hosts=way.host_count if way.host_count > 1 else None,
        )
        placements.admit(way.placed, mesh, strategy, asked)
        strategies.admit(strategy, asked)
    except ManyhandsError:
        return False
    return True
