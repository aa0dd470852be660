"""What server groups tell each other: now and then, what each has added to the parameters since the last time.

As in SINGA (Ooi et al. 2015). Every group of spans is at home in one of the server groups, in turn, so that all have as
much of this work. With x the values at home, a server of another server group has values y of its own and remembers z,
what it had from home when they last met:

    away    s ← y,  tell home d = s − z                    after every so many updates
    home    x ← x + d,  answer x
    away    y ← y + (x − s),  z ← x

So every update comes to every server group once; what is learned while the answer is under way stays; and nobody waits.

A server may die, and another goes on. So all this is in memory that outlives it, and every telling has a
number: home takes none twice, and whoever has not heard the answer asks again. New values are made aside, a note says
so, and then they are copied: whoever finds the note copies them again.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.arena import Arena
from manyhands.servers.protocol.consistency import OutOfTurn
from manyhands.servers.protocol.messages import Answer, Done, Gain, Level, Meet, Request
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.transport.host_memory import HostMemory

Reply = tuple[int, Answer | Request, Tensor | None]  # to whom, what, and the vector that goes with it

# Serials of a group: the last told to home, the last that it has answered, and from there on, by party, the last taken.
_TOLD, _HEARD, _TAKEN = 0, 1, 2


def ordinary(length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, dtype=dtype)


class Exchange:
    """One server's part in it, with its counterparts in the other server groups; `near` are those on this host.

    `groups` are those of all servers, and `allocate` gives zero-filled memory, the same to a server that takes over;
    all servers of the server group ask it in the same order.
    """

    def __init__(
        self,
        party: ServerGroup,
        groups: Sequence[SpanGroup],
        every: int,
        own: HostMemory,
        near: Mapping[int, HostMemory],
        allocate: Callable[[int, torch.dtype], Tensor] = ordinary,
    ) -> None:
        server, servers = party.rank_info.server, party.rank_info.servers
        assert server is not None
        self._party = party
        self._groups = {group.index: group for group in groups if group.server == server}
        self._away = [index for index in self._groups if not self._is_home(index)]
        self._every = every
        self._own = own
        self._near = near
        self._numbers = itertools.count(2)  # after a greeting
        length, dtype = len(own.params), own.params.dtype
        self._met = allocate(length, dtype)  # z
        self._said = allocate(length, dtype)  # s
        longest = max(group.slice.stop - group.slice.start for group in groups)
        self._made = allocate(servers * longest, dtype).view(servers, longest)[server]
        rows = _TAKEN + party.count
        self._serials = allocate(rows * len(groups), torch.int64).view(rows, len(groups)).numpy()
        self._copying = allocate(servers * 3, torch.int64).view(servers, 3)[server].numpy()
        self._updates: Counter[int] = Counter()  # by group, since home was told
        self._again: set[int] = set()  # under way, and to be told once more
        self._asked: list[tuple[int, int]] = []  # workers that want all told, and their messages' numbers
        self._outbox: list[Reply] = []

    def begin(self, index: int) -> None:
        """A group's values have been put here, and everywhere."""
        if not self._is_home(index):
            self._part(self._met, index).copy_(self._values(index))
            self._updates[index] = 0

    def take_over(self) -> None:
        """Go on where another server died."""
        index, row, serial = (int(word) for word in self._copying)
        if index:
            self._copy(index - 1, row, serial)
        self._updates.update(dict.fromkeys(self._away, 1))  # there may have been some

    def regroup(self) -> None:
        """Other workers come; those who asked will ask again."""
        self._asked.clear()

    def reunite(self, guest: int) -> Iterator[Reply]:
        """A counterpart is there again, or another in its place: what it may not have heard."""
        self._outbox = [reply for reply in self._outbox if reply[0] != guest]
        for index in self._away:
            if self._is_under_way(index) and self._party.guest(self._home(index)) == guest:
                serial = int(self._serials[_TOLD, index])
                yield guest, Gain(number=next(self._numbers), group=index, serial=serial), None

    def note(self, index: int) -> None:
        """A group was updated."""
        self._updates[index] += 1
        self._go_on(index)

    def messages(self) -> Iterator[Reply]:
        """What there is to say."""
        outbox, self._outbox = self._outbox, []
        yield from outbox

    def handle(self, sender: int, message: Gain | Level | Meet, payload: Tensor | None) -> Iterator[Reply]:
        if isinstance(message, Gain):
            if not self._is_home(message.group):
                raise OutOfTurn(f"group {message.group} is not at home here")
            self._take(sender, message, payload)
            answer = Level(number=next(self._numbers), group=message.group, serial=message.serial)
            yield sender, answer, self._values(message.group)
        elif isinstance(message, Level):
            self._hear(message, payload)
        else:
            self._asked.append((sender, message.number))
            self._again.update(self._away)
            for index in self._away:
                self._go_on(index)
        yield from self.messages()
        if not any(self._is_under_way(index) for index in self._away):
            yield from ((worker, Done(number=number), None) for worker, number in self._asked)
            self._asked.clear()

    def _go_on(self, index: int) -> None:
        """Tell home if it is time to."""
        due = index in self._again or self._updates[index] >= self._every
        if self._is_home(index) or self._is_under_way(index) or not due:
            return
        said = self._part(self._said, index).copy_(self._values(index))
        added = said - self._part(self._met, index)
        home = self._home(index)
        if home in self._near:
            self._part(self._near[home].grads(self._party.guest(self._party.number)), index).copy_(added)
        self._serials[_TOLD, index] += 1
        self._updates[index] = 0
        self._again.discard(index)
        telemetry.count("exchanges", 1)
        serial = int(self._serials[_TOLD, index])
        gain = Gain(number=next(self._numbers), group=index, serial=serial)
        self._outbox.append((self._party.guest(home), gain, added))

    def _take(self, guest: int, gain: Gain, payload: Tensor | None) -> None:
        """At home: what another server group has added."""
        row = _TAKEN + guest - self._party.guest(0)
        if gain.serial > self._serials[row, gain.group]:
            added = self._part(self._own.grads(guest), gain.group) if payload is None else payload
            self._become(gain.group, self._values(gain.group) + added, row, gain.serial)

    def _hear(self, level: Level, payload: Tensor | None) -> None:
        """Away: home has answered."""
        index = level.group
        if self._is_home(index) or level.serial > self._serials[_TOLD, index]:
            raise OutOfTurn(f"nobody asked for group {index}")
        if level.serial <= self._serials[_HEARD, index]:
            return  # it was asked twice
        if payload is None:
            payload = self._part(self._near[self._home(index)].params, index).clone()
        self._part(self._met, index).copy_(payload)
        values = payload  # the very bits, where nothing was learned meanwhile
        if self._updates[index]:
            values = self._values(index) + (payload - self._part(self._said, index))
        self._become(index, values, _HEARD, level.serial)
        self._go_on(index)

    def _become(self, index: int, values: Tensor, row: int, serial: int) -> None:
        """New values of a group, by a telling that then counts as done."""
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
        return bool(self._serials[_TOLD, index] > self._serials[_HEARD, index])

    def _home(self, index: int) -> int:
        """The party where a group is at home."""
        return index % self._party.count

    def _is_home(self, index: int) -> bool:
        return self._home(index) == self._party.number

    def _values(self, index: int) -> Tensor:
        return self._part(self._own.params, index)

    def _part(self, vector: Tensor, index: int) -> Tensor:
        return vector[self._groups[index].slice]


def make_exchange(
    party: ServerGroup, arena: Arena, scheme: Scheme, every: int, own: HostMemory, *, is_kept: bool
) -> Exchange | None:
    """For a server of one server group among several; what it knows `is_kept` for one that takes over."""
    if party.count == 1:
        return None
    near = {number: scheme.memory(arena, party, number) for number in party.near}
    return Exchange(party, scheme.groups, every, own, near, own.allocate if is_kept else ordinary)
