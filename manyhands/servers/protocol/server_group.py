"""Server groups: all servers of one hold a whole copy of the parameters among them, and serve some of the workers.

The processes of a server group, its workers included, number themselves as if they were alone in the run. Everything
else about servers works inside one group, and need not know that there are others.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.rendezvous import Neighbourhood
from manyhands.servers.protocol.consistency import Consistency


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """One server group with its workers, as one of its processes sees it."""

    number: int
    count: int  # of all server groups
    rank_info: RankInfo
    neighbours: Neighbourhood
    local_peers: frozenset[int]
    """The other groups whose counterpart of this server is on this host; none for a worker."""
    stores: tuple[Any, ...] = ()
    """The store in which each group meets, if it meets at all."""
    session: int = 0
    """Each session of a script has servers of its own, in the same processes."""

    def of_session(self, number: int) -> "ServerGroup":
        """The same for another session: its processes meet elsewhere."""
        if not number:
            return self
        own = replace(self.neighbours, store=_of_session(self.neighbours.store, number))
        stores = tuple(_of_session(store, number) for store in self.stores)
        return replace(self, session=number, neighbours=own, stores=stores)

    def peer_number(self, number: int) -> int:
        """By which number another group's counterpart of a server is known here: processes of this group come first."""
        return self.rank_info.rows + self.rank_info.servers + number

    @property
    def others(self) -> list[int]:
        return [number for number in range(self.count) if number != self.number] if self.count > 1 else []

    @property
    def own_server(self) -> int:
        """Which server of the group this process is."""
        server = self.rank_info.server
        if server is None:
            raise ValueError(f"rank {self.rank_info.rank} is a worker, not a server")
        return server

    def local_servers(self, rank: int) -> list[int]:
        """The servers on a worker's host."""
        ranks = self.neighbours.beside(rank)
        return [
            server for server in range(self.rank_info.servers) if self.rank_info.workers + server in ranks
        ]

    def computes_in_place(self, rank: int, rule: Consistency) -> bool:
        """Whether a worker's parameters are the very memory that servers update: all of them are on its host."""
        return len(self.local_servers(rank)) == self.rank_info.servers and not rule.fetches

    def speaks_for(self, *, cached: bool) -> int:
        """For how many workers this one speaks, if it does: itself, or all of its host."""
        if not cached:
            return 1
        ranks = self.neighbours.beside(self.rank_info.rank)
        return sum(rank < self.rank_info.workers for rank in ranks)

    def speakers(self, *, cached: bool) -> tuple[int, ...]:
        """The workers that speak with the servers: all, or the first of each host for the others."""
        hosts = self.neighbours.workers(self.rank_info)
        return tuple(rank for ranks in hosts for rank in (ranks[:1] if cached else ranks))


def _of_session(store: Any, number: int) -> Any:
    return dist.PrefixStore(f"session/{number}", store) if store is not None else None


def own_server_group(rank_info: RankInfo, neighbours: Neighbourhood, count: int) -> ServerGroup:
    """About equal numbers of workers, in the order of the hosts, and equal ones of servers for each."""
    if count == 1:
        return ServerGroup(
            number=0, count=1, rank_info=rank_info, neighbours=neighbours, local_peers=frozenset()
        )
    return _server_group(rank_info, neighbours, _workers(rank_info, neighbours, count))


def orphaned_server_groups(rank_info: RankInfo, neighbours: Neighbourhood, count: int) -> list[ServerGroup]:
    """Those that have no worker left, each as if this one were theirs."""
    divided = _workers(rank_info, neighbours, count)
    return [
        _server_group(
            rank_info, neighbours, [[rank_info.rank] if other == number else [] for other in range(count)]
        )
        for number, ranks in enumerate(divided)
        if not ranks
    ]


def _workers(rank_info: RankInfo, neighbours: Neighbourhood, count: int) -> list[list[int]]:
    return _divided([rank for ranks in neighbours.workers(rank_info) for rank in ranks], count)


def server_group_of_part(
    rank_info: RankInfo, neighbours: Neighbourhood, peers: Sequence[Sequence[int]]
) -> ServerGroup:
    """Where replicas are in parts: the workers that have the same part, by `peers`, and as many servers for each part.

    Parts have nothing to tell each other: each is alone in the run.
    """
    return replace(_server_group(rank_info, neighbours, peers), count=1, local_peers=frozenset(), stores=())


def _server_group(
    rank_info: RankInfo, neighbours: Neighbourhood, workers: Sequence[Sequence[int]]
) -> ServerGroup:
    """The group of this process, of those with these workers and equally many servers each."""
    count = len(workers)
    servers = _divided(range(rank_info.workers, rank_info.size), count)
    members = [[*some, *own] for some, own in zip(workers, servers, strict=True)]
    number = next(number for number, ranks in enumerate(members) if rank_info.rank in ranks)
    own = members[number]
    within = own.index(rank_info.rank)
    hosts = (tuple(own.index(rank) for rank in own if rank in ranks) for ranks in neighbours.hosts)
    stores = [
        dist.PrefixStore(f"server-group/{other}", neighbours.store) if neighbours.store else None
        for other in range(count)
    ]
    beside, server = neighbours.beside(rank_info.rank), within - len(workers[number])
    return ServerGroup(
        number=number,
        count=count,
        rank_info=replace(rank_info, rank=within, size=len(own), servers=len(servers[0])),
        neighbours=replace(neighbours, hosts=tuple(ranks for ranks in hosts if ranks), store=stores[number]),
        local_peers=frozenset(
            other
            for other, ranks in enumerate(servers)
            if other != number and server >= 0 and ranks[server] in beside
        ),
        stores=tuple(stores),
    )


def _divided(ranks: Sequence[int], count: int) -> list[list[int]]:
    edges = [-(-len(ranks) * number // count) for number in range(count + 1)]
    return [list(ranks[start:stop]) for start, stop in itertools.pairwise(edges)]
