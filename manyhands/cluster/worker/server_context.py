"""A server's place in a run."""

import contextlib
from collections.abc import Callable
from typing import Any

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.rendezvous import find_neighbours
from manyhands.comm.transports.arena import Arena
from manyhands.comm.transports.connections import Connections, port_of


class ServerContext:
    """A server's place in a run, or, where hosts come and go, in one generation: its neighbours and the host's memory.

    `check` and `connections` are those of `World`. `follows` says that the server was in the generation before.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        check: Callable[[], None] = lambda: None,
        connections: Connections | None = None,
        *,
        follows: bool = True,
    ) -> None:
        self.rank_info = rank_info
        self.follows = follows
        self.serving: Any = None  # the sessions of this process, which only the servers know
        self.rank = rank_info.rank
        self.check = check
        self._connections = connections or Connections()
        with (
            self._connections.drawing(*port_of(rank_info.store))
            if rank_info.address
            else contextlib.nullcontext()
        ):
            self.neighbours = find_neighbours(rank_info)
        self.arena = Arena(self.neighbours.memory_fd)
        self._is_closed = False

    def abandon(self) -> None:
        """Leave the memory as it is: a thread uses it, and it goes with the process."""
        self._is_closed = True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._connections.cut()
            self.arena.close()
