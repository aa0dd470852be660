"""The world of one more session of the same workers: their sums and messages are not those of the first session."""

from typing import Any

from manyhands.cluster.worker.world import World
from manyhands.comm.between import BetweenHosts
from manyhands.comm.comm import Comm
from manyhands.comm.shared import SharedComm
from manyhands.comm.transports.transport import Transport


class Twin(World):
    """`world` again, with the same host memory and a comm of its own, since a sum may go on after the step that began
    it. All workers must ask; `number` keeps groups of different twins apart."""

    def __init__(self, world: World, number: int) -> None:
        self.rank_info = world.rank_info
        self.rank, self.size, self.servers = world.rank, world.size, world.servers
        self.members, self.check = world.members, world.check
        self.neighbours, self.hosts, self.host = world.neighbours, world.hosts, world.host
        self._store, self._connections = world._store, world._connections
        self._owns_group = False
        self.divisions = {}
        self.twins = {}
        self._transport: Transport | None = None
        self._remote_group: Any = None
        self._between: BetweenHosts | None = None
        if len(self.hosts) > 1:
            network = world.network().among(f"session/{number}")
            self._remote_group = network.group("workers", range(self.size), self.rank)
            self._between = BetweenHosts(self.hosts, self.rank, network)
        self.comm: Comm = SharedComm(
            self.host, self.rank, self.size, self._between, self.transport, self._remote
        )

    def close(self) -> None:
        for division in self.divisions.values():
            division.close()
        self._between = self._transport = self._remote_group = None
        self._close_store()
