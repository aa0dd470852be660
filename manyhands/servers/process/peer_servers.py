"""How a server reaches its peers in other server groups: it goes to those after it, and those before it come."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost
from manyhands.servers.protocol.messages import Hello, encode
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.transport.connection import Connection
from manyhands.servers.transport.local_socket import LocalConnection
from manyhands.servers.transport.meeting import find_server, write


class PeerPort:
    """Connections that this server has opened, by the number of the other server, as one port."""

    def __init__(self, numbers: Iterable[int], reach: Callable[[int], Connection]) -> None:
        self._reach = reach
        self._connections = {number: reach(number) for number in numbers}
        self._lost: list[int] = []

    @property
    def numbers(self) -> Iterable[int]:
        return self._connections

    def fds(self) -> Iterator[int]:
        for connection in self._connections.values():
            yield from connection.fds()

    def take(self) -> Iterator[tuple[int, bytes, Tensor | None]]:
        for number, connection in list(self._connections.items()):
            while number in self._connections and (found := self._taken(number, connection)) is not None:
                yield number, *found

    def _taken(self, number: int, connection: Connection) -> tuple[bytes, Tensor | None] | None:
        try:
            return connection.take(wait=False)
        except PeerLost:
            self._lost.append(number)
            raise

    def send(self, worker: int, content: bytes, vector: Tensor | None) -> None:
        with contextlib.suppress(PeerLost):  # the next `take` raises it
            self._connections[worker].send(content, vector)

    def forget(self, worker: int) -> None:
        self._connections.pop(worker).close()

    def hang_up(self) -> Iterator[int]:
        """Go to the servers that have taken the place of lost ones."""
        lost, self._lost = self._lost, []
        for number in lost:
            self._connections[number].close()
            while True:
                with contextlib.suppress(PeerLost):  # it was still ending
                    self._connections[number] = self._reach(number)
                    break
            yield number

    def close(self, *, linger: bool = True) -> None:
        for connection in self._connections.values():
            connection.close(linger=linger)


def visit(group: ServerGroup, arena: Arena, scheme: Scheme) -> PeerPort:
    """Go to the peers; they need not listen yet."""
    server, own = group.own_server, group.peer_number(group.number)

    def reach(peer: int) -> Connection:
        number = peer - group.peer_number(0)
        connection: Connection
        if number in group.local_peers:
            connection = LocalConnection(scheme.memory(arena, group, number), server)
        else:
            from manyhands.servers.transport.tcp import TcpConnection, make_keys

            keys, store = make_keys(), group.stores[number]
            write(store, peer_key(server, own), keys[0].decode())
            connection = TcpConnection(server, *find_server(store, server), keys)
        connection.send(encode(Hello(number=1, worker=own, digest=scheme.digest, secret=connection.secret)))
        return connection

    return PeerPort([group.peer_number(number) for number in group.others if number > group.number], reach)


def peer_key(server: int, peer: int) -> str:
    """Under which name a peer that comes publishes its public key for a server."""
    return f"peer-key/{server}/{peer}"
