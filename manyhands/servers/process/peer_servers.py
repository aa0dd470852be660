"""How a server reaches its counterparts in other server groups: it goes to those after it, and those before it come."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost
from manyhands.servers.protocol.messages import Hello, encode
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.transport.connection import Connection
from manyhands.servers.transport.local_socket import LocalConnection


class PeerPort:
    """Lines with others, by the numbers that these have here, as a port like those at which a server listens."""

    def __init__(self, numbers: Iterable[int], reach: Callable[[int], Connection]) -> None:
        self._reach = reach
        self._lines = {number: reach(number) for number in numbers}
        self._lost: list[int] = []

    @property
    def numbers(self) -> Iterable[int]:
        return self._lines

    def fds(self) -> Iterator[int]:
        for line in self._lines.values():
            yield from line.fds()

    def take(self) -> Iterator[tuple[int, bytes, Tensor | None]]:
        for number, line in list(self._lines.items()):
            while number in self._lines and (found := self._taken(number, line)) is not None:
                yield number, *found

    def _taken(self, number: int, line: Connection) -> tuple[bytes, Tensor | None] | None:
        try:
            return line.take(wait=False)
        except PeerLost:
            self._lost.append(number)
            raise

    def send(self, worker: int, content: bytes, vector: Tensor | None) -> None:
        with contextlib.suppress(PeerLost):  # that it is gone is noticed when we next listen to it
            self._lines[worker].send(content, vector)

    def forget(self, worker: int) -> None:
        self._lines.pop(worker).close()

    def hang_up(self) -> Iterator[int]:
        """Go to those that have taken the place of counterparts that are gone."""
        lost, self._lost = self._lost, []
        for number in lost:
            self._lines[number].close()
            while True:
                with contextlib.suppress(PeerLost):  # it was still ending
                    self._lines[number] = self._reach(number)
                    break
            yield number

    def close(self, *, linger: bool = True) -> None:
        for line in self._lines.values():
            line.close(linger=linger)


def visit(party: ServerGroup, arena: Arena, scheme: Scheme) -> PeerPort:
    """Go to the counterparts; they need not listen yet."""
    server, own = party.rank_info.server, party.guest(party.number)
    assert server is not None

    def reach(guest: int) -> Connection:
        number = guest - party.guest(0)
        line: Connection
        if number in party.near:
            line = LocalConnection(scheme.memory(arena, party, number), server)
        else:
            from manyhands.servers.transport.tcp import TcpConnection, make_keys

            keys, store = make_keys(), party.stores[number]
            store.set(guest_key(server, own), keys[0].decode())
            endpoint, key = json.loads(store.get(f"server/{server}"))
            line = TcpConnection(server, endpoint, key.encode(), keys)
        line.send(encode(Hello(number=1, worker=own, digest=scheme.digest, secret=line.secret)))
        return line

    return PeerPort([party.guest(number) for number in party.others if number > party.number], reach)


def guest_key(server: int, guest: int) -> str:
    """Where a server finds the public key of a guest that comes."""
    return f"guest-key/{server}/{guest}"
