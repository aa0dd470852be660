"""The other hosts of a run, as the coordinator knows them: decisions, without sockets and clocks.

Each has a launcher that says several times a second that it is there, and which of its workers have ended. It computes
nothing, so its silence means that the host, or the way to it, is gone. Its workers are then given up; should they be
heard again, they take the state over like new ones. A run goes on where its coordinator is, and nowhere else.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from manyhands.cluster.coordinator.control import NUMBERS, HostHere, HostThere
from manyhands.cluster.coordinator.membership import Membership
from manyhands.cluster.coordinator.orders import Ending, Vanished

SILENCE_S = 3.0
SUSPICIOUS_S = 1.0  # where others have noticed that something is wrong: a connection was closed on them


@dataclass
class _RemoteHost:
    address: str
    workers: int
    servers: int
    heard_s: float
    is_here: bool = True
    ended: dict[int, Ending] = field(default_factory=dict)
    stalled: set[int] = field(default_factory=set)

    def expected(self) -> tuple[int, int]:
        """How many workers and servers of those that it begins with are still to come, or there."""
        places = [member % NUMBERS for member in self.ended]
        servers = sum(self.workers <= place < self.workers + self.servers for place in places)
        return self.workers - (len(places) - servers), self.servers - servers


class RemoteHosts:
    """`hosts` is how many there must be, the coordinator's own included, before the first generation may begin."""

    def __init__(self, membership: Membership, *, hosts: int, own_workers: int, own_servers: int = 0) -> None:
        self._membership = membership
        self._hosts = hosts
        self._own = own_workers, own_servers
        self._numbers: dict[str, int] = {}  # by token
        self._remote_hosts: dict[int, _RemoteHost] = {}
        self._vanished: list[Vanished] = []
        self._expect()

    def hear(self, said: HostHere, now_s: float) -> HostThere:
        """What a launcher says of its host; returns the answer."""
        number = self._number(said)
        host = self._remote_hosts.setdefault(
            number, _RemoteHost(said.address, said.workers, said.servers, now_s)
        )
        host.heard_s, host.is_here = now_s, True
        for member, how in said.ended:
            host.stalled.discard(member)
            if member not in host.ended and member // NUMBERS == number:
                host.ended[member] = Ending(member=member, address=host.address, how=how, at_s=now_s)
                self._expect()
                self._membership.end(member)
        self._expect()
        current = tuple(member for member in self._membership.current if member // NUMBERS == number)
        return HostThere(
            host=number, stalled=tuple(sorted(host.stalled)), current=current, missing=self._missing()
        )

    def _missing(self) -> int:
        """How many hosts must still come before the run begins."""
        has_begun = self._membership.new_generation is not None
        return 0 if has_begun else max(0, self._hosts - 1 - len(self._ready()))

    def _ready(self) -> list[_RemoteHost]:
        """The hosts that are here with workers; one that leaves before the run begins is missing again."""
        waiting = {member // NUMBERS for member in self._membership.heard}
        return [
            host
            for number, host in self._remote_hosts.items()
            if host.is_here and (host.expected()[0] or number in waiting)
        ]

    def _number(self, said: HostHere) -> int:
        """A coordinator that was started again learns the numbers from the launchers."""
        if said.token not in self._numbers:
            known = {*self._numbers.values(), *(member // NUMBERS for member in self._membership.heard)}
            is_free = said.host > 0 and said.host not in self._numbers.values()
            self._numbers[said.token] = said.host if is_free else max({0, *known}) + 1
        return self._numbers[said.token]

    def _expect(self) -> None:
        ready = self._ready()
        if self._hosts and len(ready) + 1 >= self._hosts:
            counts = [self._own, *(host.expected() for host in ready)]
            self._membership.expected, self._membership.expected_servers = map(sum, zip(*counts, strict=True))
        else:
            self._membership.expected = None

    def find_vanished(self, now_s: float) -> list[int]:
        """Give up the workers of hosts that have fallen silent; returns them."""
        lost: list[int] = []
        limit_s = SUSPICIOUS_S if self._membership.is_left else SILENCE_S
        for number, host in self._remote_hosts.items():
            if host.is_here and now_s - host.heard_s > limit_s:
                host.is_here = False
                host.stalled.clear()
                members = [member for member in self._membership.live if member // NUMBERS == number]
                waiting = set(self._membership.heard) - set(members)
                lost += [*members, *(member for member in waiting if member // NUMBERS == number)]
                if members:
                    self._vanished.append(Vanished(address=host.address, members=members, at_s=host.heard_s))
                self._expect()
        if lost:
            self._membership.lose_all(lost)
        return lost

    def see_to(self, member: int) -> bool:
        """A member is silent; says whether it is for a launcher on another host to end it, or is gone with its host."""
        host = self._remote_hosts.get(member // NUMBERS)
        if host is not None and host.is_here:
            host.stalled.add(member)
        return host is not None

    def addresses(self) -> list[str]:
        """Of the hosts that are here, besides the coordinator's."""
        return [host.address for host in self._ready()]

    def note_heard(self, member: int) -> None:
        """A member has spoken again."""
        host = self._remote_hosts.get(member // NUMBERS)
        if host is not None:
            host.stalled.discard(member)

    def endings(self, members: Collection[int]) -> list[Ending]:
        return [
            host.ended[m] for host in self._remote_hosts.values() for m in sorted(members) if m in host.ended
        ]

    def take_vanished(self) -> list[Vanished]:
        """Those that were not told yet."""
        found, self._vanished = self._vanished, []
        return found
