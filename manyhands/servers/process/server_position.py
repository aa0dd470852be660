"""One server among the processes of its server group and of its host."""

from dataclasses import dataclass
from functools import cached_property

from manyhands.comm.transports.arena import Arena, require_memory
from manyhands.servers.process.write_ahead_log import MOST_NOTED
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.host_memory import HostMemory


@dataclass(frozen=True)
class ServerPosition:
    """Which server this is, and which other processes it serves."""

    group: ServerGroup
    scheme: Scheme
    service: Service
    arena: Arena

    @property
    def index(self) -> int:
        return self.group.own_server

    @cached_property
    def memory(self) -> HostMemory:
        return self.scheme.memory(self.arena, self.group)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that speak with this server."""
        return self.group.speakers(cached=self.service.cached)

    @property
    def local_workers(self) -> set[int]:
        return set(self.group.neighbours.beside(self.group.rank_info.rank)).intersection(self.workers)

    @property
    def can_be_replaced(self) -> bool:
        """Whether all that this server knows is in its host's memory, so that a new server can go on with it."""
        return (
            len(self.local_workers) == len(self.workers)
            and self.group.rank_info.rows <= MOST_NOTED
            and len(self.group.local_peers) == len(self.group.others)
        )

    def require_memory(self, vectors: int) -> None:
        """The first server of each host asks whether the host has enough for so many vectors."""
        rank, workers = self.group.rank_info.rank, self.group.rank_info.workers
        ranks = self.group.neighbours.beside(rank)
        if rank == next(rank for rank in ranks if rank >= workers):
            require_memory(
                vectors * self.scheme.layout.length * self.scheme.dtype.itemsize,
                "parameters, optimizer state and the workers' gradients",
            )
