"""What server groups tell each other: now and then, what each has added to the parameters since the last time.

As in SINGA (Ooi et al. 2015). Every group of spans is at home in one of the server groups, in turn, so that all have as
much of this work. With x the values at home, a server of another server group has values y of its own and remembers z,
what it had when they last met:

    away    d ← y − z,  z ← y,  tell home d                after every so many updates
    home    x ← x + d,  answer x
    away    y ← y + (x − z),  z ← x

So every update comes to every server group once; what is learned while the answer is under way stays; and nobody waits.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.arena import Arena
from manyhands.servers.consistency import OutOfTurn
from manyhands.servers.memory import Memory
from manyhands.servers.messages import Answer, Done, Gain, Level, Meet, Request
from manyhands.servers.ownership import Group
from manyhands.servers.party import Party
from manyhands.servers.scheme import Scheme

Reply = tuple[int, Answer | Request, Tensor | None]  # to whom, what, and the vector that goes with it


class Exchange:
    """One server's part in it, with its counterparts in the other server groups; `near` are those on this host."""

    def __init__(
        self, party: Party, groups: Sequence[Group], every: int, own: Memory, near: Mapping[int, Memory]
    ) -> None:
        self._party = party
        self._groups = {group.index: group for group in groups}
        self._every = every
        self._own = own
        self._near = near
        self._numbers = itertools.count(2)  # after a greeting
        self._met: dict[int, Tensor] = {}  # by group that is at home elsewhere: z
        self._updates: Counter[int] = Counter()  # by group, since home was told
        self._under_way: set[int] = set()
        self._again: set[int] = set()  # under way, and to be told once more
        self._asked: list[tuple[int, int]] = []  # workers that want all told, and their messages' numbers
        self._outbox: list[Reply] = []

    def begin(self, index: int) -> None:
        """A group's values have been put here, and everywhere."""
        if not self._is_home(index):
            self._met[index] = self._values(index).clone()
            self._updates[index] = 0

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
            values = self._values(message.group)
            values.add_(self._part(self._own.grads(sender), message.group) if payload is None else payload)
            yield sender, Level(number=next(self._numbers), group=message.group), values
        elif isinstance(message, Level):
            self._take(message.group, payload)
        else:
            self._asked.append((sender, message.number))
            self._again.update(self._met)
            for index in self._met:
                self._go_on(index)
        yield from self.messages()
        if not self._under_way:
            yield from ((worker, Done(number=number), None) for worker, number in self._asked)
            self._asked.clear()

    def _go_on(self, index: int) -> None:
        """Tell home if it is time to."""
        due = index in self._again or self._updates[index] >= self._every
        if index not in self._met or index in self._under_way or not due:
            return
        values, met = self._values(index), self._met[index]
        added = values - met
        met.copy_(values)
        self._updates[index] = 0
        self._again.discard(index)
        self._under_way.add(index)
        home = index % self._party.count
        if home in self._near:
            self._part(self._near[home].grads(self._party.guest(self._party.number)), index).copy_(added)
        telemetry.count("exchanges", 1)
        self._outbox.append((self._party.guest(home), Gain(number=next(self._numbers), group=index), added))

    def _take(self, index: int, payload: Tensor | None) -> None:
        """Home has answered."""
        if index not in self._under_way:
            raise OutOfTurn(f"nobody asked for group {index}")
        self._under_way.remove(index)
        if payload is None:
            payload = self._part(self._near[index % self._party.count].params, index).clone()
        values, met = self._values(index), self._met[index]
        if self._updates[index]:
            values.add_(payload - met)
        else:
            values.copy_(payload)  # the very bits
        met.copy_(payload)
        self._go_on(index)

    def _is_home(self, index: int) -> bool:
        return index % self._party.count == self._party.number

    def _values(self, index: int) -> Tensor:
        return self._part(self._own.params, index)

    def _part(self, vector: Tensor, index: int) -> Tensor:
        return vector[self._groups[index].slice]


def make_exchange(party: Party, arena: Arena, scheme: Scheme, every: int) -> Exchange | None:
    """For a server of one server group among several."""
    if party.count == 1:
        return None
    groups = [group for group in scheme.groups if group.server == party.seat.server]
    near = {number: scheme.memory(arena, party, number) for number in party.near}
    return Exchange(party, groups, every, scheme.memory(arena, party), near)
