"""Some workers of a world as a world of their own: memory, meetings, sums and messages among them alone."""

import os
from collections.abc import Sequence
from typing import Any

from manyhands.cluster.worker.rendezvous import anonymous_memory
from manyhands.cluster.worker.world import World
from manyhands.comm.between import BetweenHosts
from manyhands.comm.comm import Comm
from manyhands.comm.shared import SharedComm
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.transport import Transport


class Division(World):
    """The group of this worker among `groups`: ranks count its members, which are `members` in the whole world."""

    def __init__(self, world: World, groups: Sequence[Sequence[int]]) -> None:
        mine = next(ranks for ranks in groups if world.rank in ranks)
        self.rank_info = world.rank_info
        self.rank = mine.index(world.rank)
        self.size = len(mine)
        self.servers = 0
        self.check = world.check
        self.members = tuple(mine)
        self.neighbours = world.neighbours
        self._store = world._store
        self._owns_group = False
        self.divisions = {}
        self.twins = {}
        self._transport: Transport | None = None
        self.hosts = _hosts(world, mine)
        local = next(ranks for ranks in self.hosts if self.rank in ranks)
        names = [mine[rank] for rank in local]
        self.host = Host(
            _memory(world, names[0]), local, local.index(self.rank), check=world.check, names=names
        )
        self._remote_group: Any = None
        self._between: BetweenHosts | None = None
        if len(self.hosts) > 1:
            network = world.network().among(f"division/{mine}")
            self._remote_group = network.group("workers", mine, world.rank)
            self._between = BetweenHosts(
                [[mine[rank] for rank in ranks] for ranks in self.hosts], world.rank, network
            )
        self.comm: Comm = SharedComm(
            self.host, self.rank, self.size, self._between, self.transport, self._remote
        )

    def close(self) -> None:
        self._close_store()
        self.host.close()


def divided(world: World, groups: Sequence[Sequence[int]]) -> World:
    """The world of this worker's group, of those into which all workers are divided; all workers must ask."""
    key = tuple(map(tuple, groups))
    if key not in world.divisions:
        world.divisions[key] = Division(world, key)
    return world.divisions[key]


def _hosts(world: World, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The group's members by host, as ranks within the group."""
    found = (tuple(ranks.index(rank) for rank in ranks if rank in host) for host in world.hosts)
    return tuple(sorted(local for local in found if local))


def _memory(world: World, first: int) -> int:
    """Anonymous memory of the group's members on this host, made by the first of them; all workers must ask."""
    own = anonymous_memory() if world.rank == first else -1
    told = world.host.exchange([float(first), float(os.getpid()), float(own)])
    _, pid, fd = next(row for rank, row in zip(world.host.ranks, told, strict=True) if rank == first)
    if own < 0:
        own = os.open(f"/proc/{int(pid)}/fd/{int(fd)}", os.O_RDWR | os.O_CLOEXEC)
    world.host.barrier()
    return own
