"""Server groups that tell each other what they have learned: nothing is lost or counted twice, whatever comes when."""

import os
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.rendezvous import Neighbourhood
from manyhands.comm.transports.arena import Arena
from manyhands.servers.process.exchange import Exchange
from manyhands.servers.process.handlers import Reply
from manyhands.servers.protocol.consistency import OutOfTurn
from manyhands.servers.protocol.messages import Done, Gain, Level, Meet
from manyhands.servers.protocol.server_group import own_server_group
from manyhands.servers.transport.host_memory import HostMemory, Sizes

COUNT = 3
LENGTH = 4  # of a group
GROUPS: list[Any] = [
    SimpleNamespace(index=index, server=0, slice=slice(index * LENGTH, (index + 1) * LENGTH))
    for index in range(4)
]
WORKER = 0  # of each server group; its server is process 1


def handle(
    server: Exchange, peer: int, message: Gain | Level, vector: torch.Tensor | None
) -> Iterable[Reply]:
    if isinstance(message, Gain):
        return server.gain(peer, message, vector)
    return server.level(peer, message, vector)


class Crowd:
    """Three servers, one of each server group, and the messages between them in order; some share a host."""

    def __init__(self, every: int, hosts: tuple[tuple[int, ...], ...]) -> None:
        self.fds = [os.memfd_create("test") for _ in hosts]
        self.arenas = [Arena(fd) for fd in self.fds]
        rank_infos = [
            RankInfo(rank=COUNT + number, size=2 * COUNT, servers=COUNT, launcher="test")
            for number in range(COUNT)
        ]
        self.every = every
        self.server_groups = [
            own_server_group(rank_info, Neighbourhood(hosts=hosts, memory_fd=-1), COUNT)
            for rank_info in rank_infos
        ]
        self.arena_of = [
            next(arena for arena, ranks in zip(self.arenas, hosts, strict=True) if rank_info.rank in ranks)
            for rank_info in rank_infos
        ]
        self.params = [self.memory(self.arena_of[number], number).params for number in range(COUNT)]
        self.servers = [self.server(number) for number in range(COUNT)]
        for server in self.servers:
            for group in GROUPS:
                server.begin(group.index)
        self.mail: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.answered = [0] * COUNT
        self.told = 0

    def server(self, number: int) -> Exchange:
        server_group, arena = self.server_groups[number], self.arena_of[number]
        own, near = (
            self.memory(arena, number),
            {other: self.memory(arena, other) for other in server_group.local_peers},
        )
        return Exchange(server_group, GROUPS, self.every, own, near, own.allocate)

    def replace(self, number: int) -> None:
        """A server dies, and what was said to it and by it is lost; another takes its place."""
        for pair in list(self.mail):
            if number in pair:
                self.mail[pair].clear()
        self.servers[number] = self.server(number)
        self.servers[number].take_over()
        for other in set(range(COUNT)) - {number}:
            self.post(number, self.servers[number].reunite(self.server_groups[number].peer_number(other)))
            self.post(other, self.servers[other].reunite(self.server_groups[other].peer_number(number)))

    def memory(self, arena: Arena, number: int) -> HostMemory:
        return HostMemory(
            arena,
            Sizes(length=len(GROUPS) * LENGTH, dtype=torch.float64, groups=4, workers=2 + COUNT),
            server_group=number,
        )

    def update(self, number: int, group: int, amount: float) -> None:
        self.params[number][GROUPS[group].slice] += amount
        self.servers[number].note(group)
        self.post(number, self.servers[number].messages())

    def post(self, number: int, replies: Iterable[Reply]) -> None:
        for to, message, vector in replies:
            if isinstance(message, Done):
                assert to == WORKER
                self.answered[number] += 1
                continue
            other = to - 2
            self.told += isinstance(message, Gain)
            is_near = other in self.server_groups[number].local_peers
            # Over the network a vector leaves as it is now; in common memory it is read when the message is.
            sent = None if is_near or vector is None else vector.clone()
            assert is_near or sent is not None
            self.mail[number, other].append((message, sent))

    def deliver(self, sender: int, receiver: int) -> None:
        if self.mail[sender, receiver]:
            message, vector = self.mail[sender, receiver].popleft()
            self.post(receiver, handle(self.servers[receiver], 2 + sender, message, vector))

    def deliver_all(self) -> None:
        while any(self.mail.values()):
            for pair in list(self.mail):
                self.deliver(*pair)

    def meet(self) -> None:
        for number, server in enumerate(self.servers):
            self.post(number, server.meet(WORKER, Meet(number=9), None))
        self.deliver_all()
        assert self.answered == [1] * COUNT
        self.answered = [0] * COUNT

    def close(self) -> None:
        self.params.clear()
        self.servers.clear()
        for arena in self.arenas:
            arena.close()


ONE_HOST = ((0, 1, 2, 3, 4, 5),)
TWO_HOSTS = ((0, 1, 3, 4), (2, 5))
EACH_ITS_OWN = ((0, 3), (1, 4), (2, 5))

events = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(0, COUNT - 1), st.integers(0, len(GROUPS) - 1)),
        st.tuples(st.just("deliver"), st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)),
    ),
    max_size=50,  # so that every sum is exact
)


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS, EACH_ITS_OWN], ids=["one host", "two", "three"])
@settings(max_examples=60, deadline=None)
@given(script=events, every=st.integers(1, 3))
def test_every_update_comes_to_everyone_once(
    hosts: tuple[tuple[int, ...], ...], script: list[tuple[str, int, int]], every: int
) -> None:
    crowd = Crowd(every, hosts)
    expected = torch.zeros(len(GROUPS) * LENGTH, dtype=torch.float64)
    for number, (what, one, other) in enumerate(script):
        if what == "update":
            # Each its own digit: what is missing or there twice can be seen.
            crowd.update(one, other, 2.0**number)
            expected[GROUPS[other].slice] += 2.0**number
        else:
            crowd.deliver(one, other)
    crowd.meet()
    crowd.meet()
    for params in crowd.params:
        assert torch.equal(params, expected)
    crowd.close()


class Killed(Exception):
    pass


@settings(max_examples=150, deadline=None)
@given(
    script=events,
    deaths=st.dictionaries(st.integers(0, 49), st.tuples(st.integers(0, COUNT - 1), st.booleans())),
    every=st.integers(1, 3),
)
def test_the_same_where_servers_die_and_others_take_their_places(
    script: list[tuple[str, int, int]], deaths: dict[int, tuple[int, bool]], every: int
) -> None:
    """Between two messages, or in the middle of taking over values."""
    crowd = Crowd(every, ONE_HOST)
    expected = torch.zeros(len(GROUPS) * LENGTH, dtype=torch.float64)

    def half_a_copy(server: Any, index: int, row: int, serial: int) -> None:
        server._values(index)[: LENGTH // 2] = server._made[: LENGTH // 2]
        raise Killed

    for number, (what, one, other) in enumerate(script):
        victim, is_late = deaths.get(number, (0, False))
        if number in deaths and is_late:
            server: Any = crowd.servers[victim]
            server._copy = partial(half_a_copy, server)
        elif number in deaths:
            crowd.replace(victim)
        try:
            if what == "update":
                expected[GROUPS[other].slice] += 2.0**number
                crowd.update(one, other, 2.0**number)
            else:
                crowd.deliver(one, other)
        except Killed:
            crowd.replace(other)
    for number in range(COUNT):
        crowd.replace(number)
    crowd.meet()
    crowd.meet()
    for params in crowd.params:
        assert torch.equal(params, expected)
    crowd.close()


def test_after_meeting_all_have_the_same_bits_also_where_sums_are_rounded() -> None:
    crowd = Crowd(1000, EACH_ITS_OWN)
    for round_ in range(3):
        for number in range(COUNT):
            for group in range(len(GROUPS)):
                crowd.update(number, group, 0.1 * (1 + number) * 3**-round_)
        crowd.meet()
        crowd.meet()
        assert torch.equal(crowd.params[0], crowd.params[1])
        assert torch.equal(crowd.params[0], crowd.params[2])
    crowd.close()


def test_home_is_told_after_every_so_many_updates_and_homes_are_shared_out() -> None:
    crowd = Crowd(3, ONE_HOST)
    for _ in range(7):
        for number in range(COUNT):
            for group in range(len(GROUPS)):
                crowd.update(number, group, 1.0)
        crowd.deliver_all()
    assert crowd.told == 2 * (COUNT - 1) * len(GROUPS), "7 ÷ 3 times, by all that are not at home"
    homes = [[group.index for group in GROUPS if group.index % COUNT == number] for number in range(COUNT)]
    assert homes == [[0, 3], [1], [2]]
    crowd.close()


def test_what_cannot_follow_is_out_of_turn() -> None:
    crowd = Crowd(1, ONE_HOST)
    peer = crowd.server_groups[0].peer_number(1)
    for message in (
        Gain(number=1, group=1, serial=1),  # at home elsewhere
        Level(number=1, group=1, serial=1),  # nobody has asked
    ):
        with pytest.raises(OutOfTurn):
            list(handle(crowd.servers[0], peer, message, torch.zeros(LENGTH, dtype=torch.float64)))
    assert not crowd.params[0].any()
    crowd.close()


def test_server_groups_divide_workers_by_host_and_servers_alike() -> None:
    hosts = ((0, 2, 4, 6), (1, 3, 5, 7))  # ranks dealt out to two hosts in turn
    numbers = {}
    for rank in range(8):
        rank_info = RankInfo(rank=rank, size=8, servers=2, launcher="test")
        server_group = own_server_group(rank_info, Neighbourhood(hosts=hosts, memory_fd=-1), 2)
        numbers[rank] = server_group.number, server_group.rank_info.rank
        assert (server_group.rank_info.size, server_group.rank_info.servers) == (4, 1)
        assert server_group.neighbours.hosts == ((0, 1, 2, 3),), "each host has its own server"
        assert not server_group.local_peers
    assert numbers == {0: (0, 0), 2: (0, 1), 4: (0, 2), 6: (0, 3), 1: (1, 0), 3: (1, 1), 5: (1, 2), 7: (1, 3)}
