"""What server groups tell each other: now and then, what each has added to the parameters since the last time.

As in SINGA (Ooi et al. 2015). Every group of spans has its home in one of the server groups, in turn, so that all have
as much of this work. With x the values at home, a server of another server group has values y of its own and remembers
z, the values that it last got from home:

    away    s ← y,  tell home d = s − z                    after every so many updates
    home    x ← x + d,  answer x
    away    y ← y + (x − s),  z ← x

So every update reaches every server group once, updates made while the answer is under way stay, and no server waits.

A server may die, and a new process takes over. So all this lies in memory that outlives the server, and every gain has
a serial number: home adds none twice, and a server that has not got the answer asks again. A server makes new values in
a buffer, notes that they are complete, and copies them; a server that takes over and finds the note copies them again.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.arena import Arena
from manyhands.servers.process.handlers import Reply
from manyhands.servers.protocol.consistency import OutOfTurn
from manyhands.servers.protocol.messages import Done, Gain, Level, Meet
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.transport.host_memory import HostMemory

# Rows of serials, by group: the last sent to home, the last that home has answered, and from there on, by server
# group, the last that was added here.
_SENT, _ANSWERED, _ADDED = 0, 1, 2


def ordinary(length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, dtype=dtype)


class Exchange:
    """One server's part in it, with its peers in the other server groups; `local` are the peers on this host.

    `groups` are those of all servers, and `allocate` gives zero-filled memory, the same to a server that takes over;
    all servers of the server group ask it in the same order.
    """

    def __init__(
        self,
        server_group: ServerGroup,
        groups: Sequence[SpanGroup],
        every: int,
        own: HostMemory,
        local: Mapping[int, HostMemory],
        allocate: Callable[[int, torch.dtype], Tensor] = ordinary,
    ) -> None:
        server, servers = server_group.own_server, server_group.rank_info.servers
        self._server_group = server_group
        self._groups = {group.index: group for group in groups if group.server == server}
        self._away = [index for index in self._groups if not self._is_home(index)]
        self._every = every
        self._own = own
        self._local = local
        self._numbers = itertools.count(2)  # after a greeting
        length, dtype = len(own.params), own.params.dtype
        self._from_home = allocate(length, dtype)  # z
        self._told = allocate(length, dtype)  # s
        longest = max(group.slice.stop - group.slice.start for group in groups)
        self._made = allocate(servers * longest, dtype).view(servers, longest)[server]
        rows = _ADDED + server_group.count
        self._serials = allocate(rows * len(groups), torch.int64).view(rows, len(groups)).numpy()
        self._copying = allocate(servers * 3, torch.int64).view(servers, 3)[server].numpy()
        self._updates: Counter[int] = Counter()  # by group, since home was told
        self._again: set[int] = set()  # under way, and to be told once more
        self._asked: list[tuple[int, int]] = []  # workers that want all told, and their messages' numbers
        self._outbox: list[Reply] = []

    def begin(self, index: int) -> None:
        """The first worker has put a group's values here, and on every server group."""
        if not self._is_home(index):
            self._part(self._from_home, index).copy_(self._values(index))
            self._updates[index] = 0

    def take_over(self) -> None:
        """Go on where another server died."""
        index, row, serial = (int(word) for word in self._copying)
        if index:
            self._copy(index - 1, row, serial)
        self._updates.update(dict.fromkeys(self._away, 1))  # there may have been some

    def regroup(self) -> None:
        """Workers of a new generation come; those that asked will ask again."""
        self._asked.clear()

    def reunite(self, peer: int) -> Iterator[Reply]:
        """A peer is there again, or a new process in its place: the messages that it may have missed."""
        self._outbox = [reply for reply in self._outbox if reply[0] != peer]
        for index in self._away:
            if self._is_under_way(index) and self._server_group.peer_number(self._home(index)) == peer:
                serial = int(self._serials[_SENT, index])
                yield peer, Gain(number=next(self._numbers), group=index, serial=serial), None

    def note(self, index: int) -> None:
        """The server has updated a group."""
        self._updates[index] += 1
        self._tell_home_if_due(index)

    def messages(self) -> Iterator[Reply]:
        """Messages for peers."""
        outbox, self._outbox = self._outbox, []
        yield from outbox

    # Handlers

    def gain(self, peer: int, message: Gain, payload: Tensor | None) -> Iterator[Reply]:
        """At home: a peer tells what its server group has added."""
        if not self._is_home(message.group):
            raise OutOfTurn(f"group {message.group} is not at home here")
        row = _ADDED + peer - self._server_group.peer_number(0)
        if message.serial > self._serials[row, message.group]:
            added = self._part(self._own.grads(peer), message.group) if payload is None else payload
            self._set(message.group, self._values(message.group) + added, row, message.serial)
        answer = Level(number=next(self._numbers), group=message.group, serial=message.serial)
        yield peer, answer, self._values(message.group)
        yield from self._rest()

    def level(self, peer: int, message: Level, payload: Tensor | None) -> Iterator[Reply]:
        """Away: home has answered."""
        index = message.group
        if self._is_home(index) or message.serial > self._serials[_SENT, index]:
            raise OutOfTurn(f"this server has not asked for group {index}")
        if message.serial > self._serials[_ANSWERED, index]:  # else home was asked twice
            self._reconcile(message, payload)
        yield from self._rest()

    def meet(self, worker: int, message: Meet, payload: Tensor | None) -> Iterator[Reply]:
        """A worker wants home to know all that was added."""
        self._asked.append((worker, message.number))
        self._again.update(self._away)
        for index in self._away:
            self._tell_home_if_due(index)
        yield from self._rest()

    def _rest(self) -> Iterator[Reply]:
        yield from self.messages()
        if not any(self._is_under_way(index) for index in self._away):
            yield from ((worker, Done(number=number), None) for worker, number in self._asked)
            self._asked.clear()

    def _tell_home_if_due(self, index: int) -> None:
        due = index in self._again or self._updates[index] >= self._every
        if self._is_home(index) or self._is_under_way(index) or not due:
            return
        told = self._part(self._told, index).copy_(self._values(index))
        added = told - self._part(self._from_home, index)
        home, own = self._home(index), self._server_group.peer_number(self._server_group.number)
        if home in self._local:
            self._part(self._local[home].grads(own), index).copy_(added)
        self._serials[_SENT, index] += 1
        self._updates[index] = 0
        self._again.discard(index)
        telemetry.count("exchanges", 1)
        serial = int(self._serials[_SENT, index])
        gain = Gain(number=next(self._numbers), group=index, serial=serial)
        self._outbox.append((self._server_group.peer_number(home), gain, added))

    def _reconcile(self, message: Level, payload: Tensor | None) -> None:
        """Take over the values at home, and keep what was added here in the meantime."""
        index = message.group
        if payload is None:
            payload = self._part(self._local[self._home(index)].params, index).clone()
        self._part(self._from_home, index).copy_(payload)
        values = payload  # the very bits, where nothing was added meanwhile
        if self._updates[index]:
            values = self._values(index) + (payload - self._part(self._told, index))
        self._set(index, values, _ANSWERED, message.serial)
        self._tell_home_if_due(index)

    def _set(self, index: int, values: Tensor, row: int, serial: int) -> None:
        """New values of a group; with them the message of this serial counts as handled."""
        self._made[: len(values)] = values
        self._copying[1], self._copying[2] = row, serial
        self._copying[0] = 1 + index  # last: from here on it can be done again
        self._copy(index, row, serial)

    def _copy(self, index: int, row: int, serial: int) -> None:
        values = self._values(index)
        values.copy_(self._made[: len(values)])
        self._serials[row, index] = serial
        self._copying[0] = 0

    def _is_under_way(self, index: int) -> bool:
        return bool(self._serials[_SENT, index] > self._serials[_ANSWERED, index])

    def _home(self, index: int) -> int:
        """The server group in which a group of spans has its home."""
        return index % self._server_group.count

    def _is_home(self, index: int) -> bool:
        return self._home(index) == self._server_group.number

    def _values(self, index: int) -> Tensor:
        return self._part(self._own.params, index)

    def _part(self, vector: Tensor, index: int) -> Tensor:
        return vector[self._groups[index].slice]


def make_exchange(
    server_group: ServerGroup, arena: Arena, scheme: Scheme, every: int, own: HostMemory, *, is_kept: bool
) -> Exchange:
    """For a server of one server group among several; with `is_kept` its state outlives it, for one that takes over."""
    local = {number: scheme.memory(arena, server_group, number) for number in server_group.local_peers}
    allocate = own.allocate if is_kept else ordinary
    return Exchange(server_group, scheme.groups, every, own, local, allocate)
