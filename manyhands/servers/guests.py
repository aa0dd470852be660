"""How a server reaches its counterparts in other server groups: it goes to those after it, and those before it come."""

import json
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from manyhands.comm.transports.arena import Arena
from manyhands.servers.client import Line
from manyhands.servers.messages import Hello, encode
from manyhands.servers.near import NearLine
from manyhands.servers.party import Party
from manyhands.servers.scheme import Scheme


class LinePort:
    """Lines with others, by the numbers that these have here, as a port like those at which a server listens."""

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self._lines = dict(lines)

    @property
    def numbers(self) -> Iterable[int]:
        return self._lines

    def fds(self) -> Iterator[int]:
        for line in self._lines.values():
            yield from line.fds()

    def take(self) -> Iterator[tuple[int, bytes, Tensor | None]]:
        for number, line in list(self._lines.items()):
            while number in self._lines and (found := line.take(wait=False)) is not None:
                yield number, *found

    def send(self, worker: int, content: bytes, vector: Tensor | None) -> None:
        self._lines[worker].send(content, vector)

    def forget(self, worker: int) -> None:
        self._lines.pop(worker).close()

    def hang_up(self) -> None:
        """Counterparts stay."""

    def close(self, *, linger: bool = True) -> None:
        for line in self._lines.values():
            line.close(linger=linger)


def visit(party: Party, arena: Arena, scheme: Scheme) -> LinePort:
    """Go to the counterparts; they need not listen yet."""
    server, own = party.seat.server, party.guest(party.number)
    assert server is not None
    lines: dict[int, Line] = {}
    for number in range(party.number + 1, party.count):
        line: Line
        if number in party.near:
            line = NearLine(scheme.memory(arena, party, number), server)
        else:
            from manyhands.servers.wire import WireLine, make_keys

            keys, store = make_keys(), party.stores[number]
            store.set(guest_key(server, own), keys[0].decode())
            endpoint, key = json.loads(store.get(f"server/{server}"))
            line = WireLine(server, endpoint, key.encode(), keys)
        line.send(encode(Hello(number=1, worker=own, digest=scheme.digest, secret=line.secret)))
        lines[party.guest(number)] = line
    return LinePort(lines)


def guest_key(server: int, guest: int) -> str:
    """Where a server finds the public key of a guest that comes."""
    return f"guest-key/{server}/{guest}"
