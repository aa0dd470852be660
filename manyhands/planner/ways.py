"""One way of distributing a job: what a search compares, and what a plan is made of."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from manyhands import placement as placements
from manyhands import strategies
from manyhands.placement import Mesh, Placement
from manyhands.strategies import Strategy, Traits

# A search asks for the same few thousands of times.
parsed_strategy = lru_cache(maxsize=4096)(strategies.parse)
parsed_placement = lru_cache(maxsize=4096)(placements.parse)


@lru_cache(maxsize=4096)
def traits_of(strategy: str) -> Traits:
    return parsed_strategy(strategy).traits


@dataclass(frozen=True, kw_only=True)
class HostSplit:
    """So many hosts of one kind, each cut into processes × threads."""

    kind: str
    count: int
    processes: int
    threads: int

    def __str__(self) -> str:
        hosts = f"{self.count} hosts × " if self.count > 1 else ""
        return f"{hosts}{self.processes} × {self.threads}"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A strategy, a placement, the cores of every host, and servers."""

    strategy: str
    hosts: tuple[HostSplit, ...]
    placement: str = placements.DEFAULT
    servers: int = 0

    @cached_property
    def workers(self) -> int:
        return sum(each.count * each.processes for each in self.hosts)

    @cached_property
    def host_count(self) -> int:
        return sum(each.count for each in self.hosts)

    @cached_property
    def parsed(self) -> Strategy:
        return parsed_strategy(self.strategy)

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self.strategy)

    @cached_property
    def placed(self) -> Placement:
        return parsed_placement(self.placement)

    @cached_property
    def mesh(self) -> Mesh:
        return self.placed.mesh(self.workers)

    @property
    def trains_alike(self) -> bool:
        """Whether a step equals one of a single process on the samples of all workers together."""
        return self.traits.synchronous

    def __str__(self) -> str:
        words = [self.strategy, " + ".join(map(str, self.hosts))]
        if self.placement != placements.DEFAULT:
            words.append(self.placement)
        if self.servers:
            words.append(f"{self.servers} server{'s' if self.servers > 1 else ''}")
        return ", ".join(words)

    @property
    def simplicity(self) -> tuple[int, ...]:
        """What is simpler sorts first: fewer hosts, processes and parts, and what the tables name first."""
        known = list(strategies.STRATEGIES)
        name = self.strategy.partition(":")[0]
        return (
            self.host_count,
            self.servers,
            self.placement != placements.DEFAULT,
            self.workers,
            ":" in self.strategy,
            known.index(name) if name in known else len(known),
        )
