"""The doors of a server: garbage, truncated and replayed frames, wrong keys and strangers change and stop nothing."""

import contextlib
import functools
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands import telemetry
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.rendezvous import Neighbourhood
from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost
from manyhands.servers.process import startup
from manyhands.servers.process.exchange import Exchange
from manyhands.servers.process.participants import Participants
from manyhands.servers.process.peer_servers import PeerPort
from manyhands.servers.process.server import Server
from manyhands.servers.protocol import messages
from manyhands.servers.protocol.consistency import ASYNC, SYNC, Clocks, Consistency, stale
from manyhands.servers.protocol.messages import Finish, Hello, NotAMessage, Pull, Push, encode
from manyhands.servers.protocol.scheme import Scheme, describe
from manyhands.servers.protocol.server_group import ServerGroup, own_server_group
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.host_memory import HostMemory, Sizes
from manyhands.servers.transport.local_socket import _name
from manyhands.servers.transport.tcp import TcpConnection, TcpPort, make_keys
from manyhands.servers.worker import connecting
from manyhands.servers.worker.client import Servers
from manyhands.servers.worker.server_connections import answer
from tests.dispatchers import make_dispatcher

WORKERS = 2
GROUP_BYTES = 1 << 14


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 30))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


@dataclass
class Running:
    """A server in a thread, and two workers that push to it over the loopback network."""

    scheme: Scheme
    store: Any
    workers: list[Servers]
    errors: list[BaseException]

    gradient: Callable[[Scheme, int, int], torch.Tensor]

    def step(self, seed: int) -> None:
        """One step of both workers, each with a gradient of its own; all that they have pushed before is applied."""
        for servers in self.workers:
            servers.settle()  # until then the servers, or ZeroMQ, may still read the last gradients
        for worker, servers in enumerate(self.workers):
            servers.wait()
            servers.grads.copy_(self.gradient(self.scheme, seed, worker))
            for span in self.scheme.spans:
                servers.push(span)
        threads = [threading.Thread(target=servers.finish) for servers in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not self.errors, self.errors

    def params(self) -> torch.Tensor:
        for servers in self.workers:
            servers.settle()
        self.workers[0].pull()
        return self.workers[0].params * covered(self.scheme)

    @property
    def endpoint(self) -> tuple[str, bytes]:
        import json

        place, key = json.loads(self.store.get("server/0"))
        return place, key.encode()


def gradient(scheme: Scheme, seed: int, worker: int) -> torch.Tensor:
    return torch.randn(scheme.layout.length, generator=torch.Generator().manual_seed(10 * seed + worker))


APART = ((0,), (1,), (2,))  # each a host of its own: nothing in common but the network


@contextlib.contextmanager
def running(
    rule: Consistency,
    make: Callable[[], tuple[nn.Module, Any]] = make_model,
    hosts: tuple[tuple[int, ...], ...] = APART,
) -> Iterator[Running]:
    """Two workers; what other ranks there are on the hosts are servers."""
    store = dist.HashStore()
    size = sum(map(len, hosts))
    count = size - WORKERS
    rank_infos = [RankInfo(rank=rank, size=size, servers=count, launcher="test") for rank in range(size)]
    fds = [os.memfd_create("test") for _ in hosts]
    errors: list[BaseException] = []
    arenas: list[Arena] = []

    def place(rank: int) -> tuple[Neighbourhood, Arena]:
        fd = next(fd for fd, ranks in zip(fds, hosts, strict=True) if rank in ranks)
        arenas.append(Arena(os.dup(fd)))
        return Neighbourhood(hosts=hosts, memory_fd=fd, store=store), arenas[-1]

    def serve(rank: int) -> None:
        model, optimizer = make()
        places, arena = place(rank)
        context: Any = SimpleNamespace(rank_info=rank_infos[rank], neighbours=places, arena=arena)
        try:
            scheme = describe(model, optimizer, count, GROUP_BYTES)
            startup.serve(context, model, optimizer, scheme, Service(rule=rule))
        except BaseException as error:
            errors.append(error)

    ranks = range(WORKERS, size)
    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in ranks]
    for server in threads:
        server.start()
    model, optimizer = make()
    scheme = describe(model, optimizer, count, GROUP_BYTES)
    found: list[Servers] = [None] * WORKERS  # type: ignore[list-item]

    def join(rank: int) -> None:
        places, arena = place(rank)
        server_group = own_server_group(rank_infos[rank], places, rule.server_groups)
        vectors = connecting.own_vectors(server_group, arena, scheme, rule, rank, connecting.ordinary)
        connections = connecting.connect(server_group, arena, scheme, cached=False, check=lambda: None)
        replica: Any = SimpleNamespace(
            arrived=[1] * len(scheme.layout.places),
            used=torch.ones(len(scheme.layout.places)),
            optimizer=optimizer,
            layout=scheme.layout,
            tables=None,
            write_after=lambda wait, in_flight: None,
        )
        service = Service(rule=rule)
        found[rank] = connecting.servers_of(
            server_group, arena, scheme, service, connections, vectors, replica
        )

    joins = [threading.Thread(target=join, args=(rank,)) for rank in range(WORKERS)]
    for thread in joins:
        thread.start()
    for thread in joins:
        thread.join(20)
    world = Running(scheme=scheme, store=store, workers=found, errors=errors, gradient=gradient)
    world.workers[0].put("params", torch.zeros(scheme.layout.length))
    for servers in world.workers:
        servers.pull()
    try:
        yield world
        for servers in world.workers:
            servers.close()
        for server in threads:
            server.join(20)
            assert not server.is_alive()
        assert not errors, errors
    finally:
        for arena in arenas:
            arena.close()
        for fd in fds:
            os.close(fd)


def dropped() -> float:
    return telemetry.totals().get("frames_dropped", 0)


def strangers() -> float:
    return telemetry.totals().get("strangers", 0)


def expected(scheme: Scheme, steps: int) -> torch.Tensor:
    total = torch.zeros(scheme.layout.length)
    for seed in range(steps):
        total += gradient(scheme, seed, 0) + gradient(scheme, seed, 1)
    return -0.5 * total * covered(scheme)


def covered(scheme: Scheme) -> torch.Tensor:
    """1 where a parameter lies; the room between them holds anything."""
    mask = torch.zeros(scheme.layout.length)
    for place in scheme.layout.places:
        mask[place.start : place.stop] = 1
    return mask


def attack_by_a_worker(world: Running) -> int:
    """What a worker's own, well authenticated connection may go mad with; returns how many frames are to be dropped."""
    servers = world.workers[1]
    line: Any = servers.connections._connections[0]
    numbers = servers.connections.numbers
    groups = world.scheme.groups
    right = encode(Push(number=next(numbers), group=0, step=7, seen=0))
    whole = world.scheme.groups[0].length * 4
    hostile: list[list[bytes]] = [
        [b"garbage"],
        [b""],
        [bytes(5000)],
        [right[:-3], bytes(whole)],  # cut off
        [right, bytes(whole)],  # a step that is not its turn
        [encode(Push(number=next(numbers), group=0, step=0, seen=0)), bytes(whole - 4)],  # too short
        [encode(Push(number=next(numbers), group=0, step=0, seen=0)), bytes(whole + 4)],  # too long
        [encode(Push(number=next(numbers), group=0, step=0, seen=0))],  # without its vector
        [encode(Push(number=next(numbers), group=len(groups), step=0, seen=0)), bytes(whole)],
        [encode(Push(number=next(numbers), group=-1, step=0, seen=0)), bytes(whole)],
        [encode(Push(number=next(numbers), group=0, step=0, seen=10**9)), bytes(whole)],
        [encode(Pull(number=next(numbers), group=0, vector="../../etc/passwd"))],
        [encode(Finish(number=next(numbers), step=99))],
        [encode(Hello(number=next(numbers), worker=0, digest=world.scheme.digest))],  # as somebody else
        [encode(Pull(number=1, group=0))],  # a number that was used before: replayed
        [encode(Pull(number=next(numbers), group=0)), b"", b"", b""],
    ]
    for frames in hostile:
        line._socket.send_multipart(frames)
    return len(hostile)


def test_nothing_that_a_worker_sends_by_mistake_changes_the_result() -> None:
    before = dropped()
    with running(SYNC) as world:
        world.step(0)
        count = attack_by_a_worker(world)
        world.step(1)
        world.step(2)
        assert torch.allclose(world.params(), expected(world.scheme, 3), atol=1e-5)
    assert dropped() - before == count


def recorded(world: Running, act: Callable[[], None]) -> list[list[bytes]]:
    """What worker 0 sends meanwhile."""
    line: Any = world.workers[0].connections._connections[0]
    sent: list[list[bytes]] = []
    send = line._socket.send_multipart
    line._socket.send_multipart = lambda frames, **more: (
        sent.append(list(map(bytes, frames))),
        send(frames, **more),
    )
    act()
    del line._socket.send_multipart
    return sent


def replay(world: Running, sent: list[list[bytes]]) -> None:
    line: Any = world.workers[0].connections._connections[0]
    for frames in sent:
        line._socket.send_multipart(frames)


def test_a_replayed_push_is_applied_once() -> None:
    before = dropped()
    with running(ASYNC) as world:
        sent = recorded(world, lambda: world.step(0))
        world.params()
        replay(world, sent)
        world.step(1)
        assert torch.allclose(world.params(), expected(world.scheme, 2), atol=1e-5)
    assert dropped() - before == len(sent) > 2


def plain_tcp(place: str, key: bytes) -> None:
    address, port = place.removeprefix("tcp://").rsplit(":", 1)
    for content in (b"GET / HTTP/1.1\r\n\r\n", bytes(70_000), os.urandom(500)):
        with socket.create_connection((address, int(port)), timeout=10) as link, contextlib.suppress(OSError):
            link.sendall(content)


def without_keys(place: str, key: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(place)
        dealer.send_multipart([encode(Pull(number=1, group=0))])
        assert not dealer.poll(300)


def with_a_key_of_its_own(place: str, key: bytes) -> None:
    line = TcpConnection(0, place, key, make_keys())
    line._socket.linger = 0
    line.send(encode(Hello(number=1, worker=0, digest=0)))
    assert not line._socket.poll(300)
    line.close()


def with_another_servers_key(place: str, key: bytes) -> None:
    line = TcpConnection(0, place, make_keys()[0], make_keys())
    line._socket.linger = 0
    line.send(encode(Hello(number=1, worker=0, digest=0)))
    assert not line._socket.poll(300)
    line.close()


@pytest.mark.parametrize("attack", [plain_tcp, without_keys, with_a_key_of_its_own, with_another_servers_key])
def test_a_stranger_gets_nowhere(attack: Callable[[str, bytes], None]) -> None:
    before = dropped()
    with running(SYNC) as world:
        world.step(0)
        attack(*world.endpoint)
        world.step(1)
        assert torch.allclose(world.params(), expected(world.scheme, 2), atol=1e-5)
    assert dropped() == before


ROWS, COLUMNS = 5000, 16
ROW_BYTES = 4 * COLUMNS + 4  # with its number
BESIDE = ((0, 2), (1, 3))  # each worker has one server on its host and one far away


def make_words() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Embedding(ROWS, COLUMNS, sparse=True), nn.Linear(COLUMNS, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def some_rows(scheme: Scheme, seed: int, worker: int, count: int = 10) -> torch.Tensor:
    """A gradient of the linear layer, and of some rows of the table, not the same for the two workers."""
    whole = gradient(scheme, seed, worker)
    (table,) = [place for place in scheme.layout.places if place.rows]
    rows = whole[table.start : table.stop].view(ROWS, COLUMNS)
    touched = torch.arange(worker, ROWS, 2)[
        torch.randperm(ROWS // 2, generator=_seeded(seed, worker))[:count]
    ]
    mask = torch.ones(ROWS, dtype=torch.bool)
    mask[touched] = False
    rows[mask] = 0.0
    return whole


def _seeded(seed: int, worker: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * seed + worker)


def sum_of_rows(scheme: Scheme, steps: int) -> torch.Tensor:
    total = sum(some_rows(scheme, seed, worker) for seed in range(steps) for worker in range(WORKERS))
    return -0.5 * total * covered(scheme)


@pytest.mark.parametrize("count", [10, 200])
@pytest.mark.parametrize("rule", [SYNC, ASYNC], ids=["sync", "async"])
def test_bytes_are_those_of_the_touched_rows(rule: Consistency, count: int) -> None:
    steps = 4
    with running(rule, make_words) as world:
        world.gradient = functools.partial(some_rows, count=count)
        before = telemetry.totals().get("bytes_sent", 0)
        for seed in range(steps):
            world.step(seed)
        for servers in world.workers:
            servers.settle()
        sent = telemetry.totals()["bytes_sent"] - before
        # Every worker sends its rows, and hears of its own and the other's; the last answers of an asynchronous one may
        # have come before the other had pushed.
        most = steps * WORKERS * 3 * count * ROW_BYTES
        least = most - (WORKERS * count * ROW_BYTES if rule is ASYNC else 0)
        others = steps * WORKERS * 2000  # the linear layer, and headers
        assert least <= sent <= most + others
        assert others < 0.02 * steps * WORKERS * ROWS * ROW_BYTES


@pytest.mark.parametrize("hosts", [APART, BESIDE, ((0, 1, 2), (3,))], ids=["apart", "beside", "among"])
@pytest.mark.parametrize("rule", [SYNC, ASYNC, stale(1)], ids=["sync", "async", "stale"])
def test_nothing_is_missed_of_rows_that_others_have_changed(
    rule: Consistency, hosts: tuple[tuple[int, ...], ...]
) -> None:
    """Without a pull: answers alone keep every worker's copy as it should be."""
    steps = 5
    with running(rule, make_words, hosts) as world:
        world.gradient = some_rows
        for seed in range(steps):
            world.step(seed)
        world.gradient = lambda scheme, seed, worker: torch.zeros(scheme.layout.length)
        world.step(steps)  # an answer to each, after all that the others have pushed
        for servers in world.workers:
            servers.settle()
            servers.wait()
        want = sum_of_rows(world.scheme, steps)
        for servers in world.workers:
            assert torch.allclose(servers.params * covered(world.scheme), want, atol=1e-5)
        assert torch.allclose(world.params(), want, atol=1e-5)


def test_answers_that_come_between_two_waits_are_all_put_in_place() -> None:
    with running(ASYNC, make_words) as world:
        one, other = world.workers
        for seed in range(3):
            for worker, servers in enumerate((one, other)):
                servers.grads.copy_(some_rows(world.scheme, seed, worker))
                for span in world.scheme.spans:
                    servers.push(span)
                servers.finish()
                servers.settle()  # its answers have come, and are not looked at
        other.wait()
        assert torch.allclose(other.params * covered(world.scheme), sum_of_rows(world.scheme, 3), atol=1e-5)


def test_a_pull_of_news_is_a_pull() -> None:
    with running(Consistency(fetches=True), make_words) as world:
        world.gradient = some_rows
        for seed in range(3):
            world.step(seed)
            for servers in world.workers:
                servers.settle()
            before = telemetry.totals()["bytes_sent"]
            for servers in world.workers:
                servers.pull(whole=False)
                want = sum_of_rows(world.scheme, seed + 1)
                assert torch.allclose(servers.params * covered(world.scheme), want, atol=1e-5)
            assert telemetry.totals()["bytes_sent"] - before < 40 * ROW_BYTES + 2000


def rows(*numbers: int) -> bytes:
    return torch.tensor(numbers, dtype=torch.int32).numpy().tobytes()


HOSTILE_ROWS: dict[str, tuple[bytes, int]] = {  # the numbers, and how many bytes of rows come with them
    "not ascending": (rows(3, 2), 2 * 4 * COLUMNS),
    "twice the same": (rows(1, 1), 2 * 4 * COLUMNS),
    "negative": (rows(-1), 4 * COLUMNS),
    "behind the last": (rows(ROWS), 4 * COLUMNS),
    "half a number": (b"abc", 4 * COLUMNS),
    "fewer rows than numbers": (rows(1, 2), 4 * COLUMNS),
    "a row cut off": (rows(1, 2), 2 * 4 * COLUMNS - 4),
    "more rows than numbers": (rows(1), 2 * 4 * COLUMNS),
    "rows without numbers": (b"", 4 * COLUMNS),
    "numbers without rows": (rows(1), 0),
}


@pytest.mark.parametrize("what", HOSTILE_ROWS)
def test_rows_that_cannot_be_are_dropped(what: str) -> None:
    numbers, size = HOSTILE_ROWS[what]
    before = dropped()
    with running(SYNC, make_words) as world:
        world.gradient = some_rows
        world.step(0)
        (table,) = [group for group in world.scheme.groups if group.table]
        (linear,) = [group for group in world.scheme.groups if not group.table]
        servers, line = world.workers[1], world.workers[1].connections._connections[0]
        for group in (table, linear):  # the linear layer has no rows at all
            push = Push(
                number=next(servers.connections.numbers), group=group.index, step=1, seen=1, rows=numbers
            )
            line._socket.send_multipart([encode(push), b"\x41" * size])  # type: ignore[attr-defined]
        world.step(1)
        assert torch.allclose(world.params(), sum_of_rows(world.scheme, 2), atol=1e-5)
    assert dropped() - before == 2


def test_a_replayed_push_of_rows_is_applied_once() -> None:
    before = dropped()
    with running(ASYNC, make_words) as world:
        world.gradient = some_rows
        sent = recorded(world, lambda: world.step(0))
        world.params()
        replay(world, sent)
        world.step(1)
        assert torch.allclose(world.params(), sum_of_rows(world.scheme, 2), atol=1e-5)
    assert dropped() - before == len(sent) > 2


def test_a_server_listens_on_one_interface_only() -> None:
    with running(ASYNC) as world:
        assert world.endpoint[0].startswith("tcp://127.0.0.1:")


def test_a_worker_that_is_gone_is_noticed_by_the_server() -> None:
    with contextlib.suppress(AssertionError), running(ASYNC) as world:
        line: Any = world.workers[1].connections._connections[0]
        line._socket.linger = 0
        line.close()
        for _ in range(200):
            if world.errors:
                break
            threading.Event().wait(0.05)
        world.workers[1].connections._closed = True
    assert isinstance(world.errors[0], PeerLost)
    assert "worker 1" in str(world.errors[0])


def test_a_goodbye_is_heard_although_its_connection_is_closed_already() -> None:
    """It may come while the server looks whose connection was closed."""
    keys, own = make_keys(), [make_keys(), make_keys()]
    port = TcpPort("127.0.0.1", keys)
    port.allow({own[0][0]: 0, own[1][0]: 1})
    lines = [TcpConnection(0, port.endpoint, keys[0], one) for one in own]
    heard: list[bytes] = []

    def listen(until: int) -> None:
        while len(heard) < until:
            for worker, content, _ in port.take():
                heard.append(content)
                if content == b"bye":
                    port.forget(worker)

    def close(line: TcpConnection) -> None:
        line.send(b"bye")
        line.close()

    try:
        for line in lines:
            line.send(b"hello")
        listen(until=2)
        was_closed = port._was_closed

        def closed_meanwhile() -> bool:
            if not was_closed():
                return False
            port._was_closed = was_closed  # type: ignore[method-assign]
            close(lines[1])
            while port._reaches(1):
                threading.Event().wait(0.01)
            return True

        port._was_closed = closed_meanwhile  # type: ignore[method-assign]
        close(lines[0])
        listen(until=4)
        assert heard == [b"hello", b"hello", b"bye", b"bye"]
    finally:
        port.close()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.binary(max_size=300))
def test_bytes_are_a_message_or_not(content: bytes) -> None:
    with contextlib.suppress(NotAMessage):
        assert encode(messages.request(content))
    with contextlib.suppress(NotAMessage):
        assert encode(answer(content))


_small = st.integers(-2, 5)
_names = st.sampled_from(["params", "gradient", "momentum_buffer", "v0", ""])
_odd = st.sampled_from([0.0, 1.0, -1.0, 1e300, float("nan"), float("inf")])
_settings = st.lists(
    st.dictionaries(st.sampled_from(["lr", "momentum", "nesterov"]), st.lists(_odd, max_size=2))
)
_states = st.one_of(
    st.binary(max_size=20),
    st.binary(max_size=20).map(lambda blob: msgspec.msgpack.encode([{"0.weight": {"x": "tensor"}}, blob])),
)
_some_rows = st.lists(st.integers(-1, 9), max_size=4).map(lambda numbers: rows(*numbers))
_said = st.one_of(
    st.builds(
        Push,
        number=st.just(0),
        group=_small,
        step=_small,
        seen=_small,
        samples=st.integers(0, 3),
        missing=st.lists(_small).map(tuple),
        rows=st.one_of(st.none(), st.binary(max_size=9), _some_rows),
        settings=st.one_of(st.none(), _settings),
    ),
    st.builds(Finish, number=st.just(0), step=_small),
    st.builds(messages.ScaleGradients, number=st.just(0), factor=_odd),
    st.builds(messages.Leave, number=st.just(0)),
    st.builds(Pull, number=st.just(0), group=_small, vector=_names, whole=st.booleans()),
    st.builds(messages.Put, number=st.just(0), group=_small, vector=_names),
    st.builds(messages.BeginEvaluation, number=st.just(0), portions=_small),
    st.builds(messages.TakePortion, number=st.just(0)),
    st.builds(messages.AddGradient, number=st.just(0), group=_small),
    st.builds(
        messages.Combine,
        number=st.just(0),
        vector=_names,
        terms=st.lists(st.tuples(_names, _odd), max_size=3),
        forgotten=st.lists(_names, max_size=2),
    ),
    st.builds(
        messages.Measure,
        number=st.just(0),
        kind=st.sampled_from(["dot", "magnitudes", "largest", "?"]),
        one=_names,
        other=_names,
    ),
    st.builds(messages.Gain, number=st.just(0), group=_small, serial=_small),
    st.builds(messages.HomeValues, number=st.just(0), group=_small, serial=_small),
    st.builds(messages.ExchangeNow, number=st.just(0)),
    st.builds(messages.AskState, number=st.just(0)),
    st.builds(messages.GiveState, number=st.just(0), states=_states),
    st.builds(messages.AskReport, number=st.just(0)),
)


# Two parties of two workers and a server; the other's server is known by this number.
SERVER_GROUP = ServerGroup(
    number=0,
    count=2,
    rank_info=RankInfo(rank=2, size=3, servers=1, launcher="test"),
    neighbours=Neighbourhood(hosts=((0, 1, 2),), memory_fd=-1),
    local_peers=frozenset(),
)
PEER = SERVER_GROUP.peer_number(1)


class _Mouth:
    """A port through which a test says what it likes."""

    def __init__(self) -> None:
        self.next: tuple[int, bytes, torch.Tensor | None] | None = None

    def take(self) -> Iterator[tuple[int, bytes, torch.Tensor | None]]:
        said, self.next = self.next, None
        if said is not None:
            yield said

    def send(self, worker: int, content: bytes, vector: torch.Tensor | None) -> None:
        answer(content)

    def forget(self, worker: int) -> None: ...


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    told=st.lists(
        st.tuples(st.sampled_from([0, 1, PEER]), _said, st.sampled_from(["right", "right", "short", "none"])),
        max_size=25,
    ),
    clips=st.booleans(),
    rule=st.sampled_from([SYNC, ASYNC, stale(0), Consistency(gathers=True, server_groups=2)]),
)
def test_no_message_of_the_right_form_ends_a_server(
    told: list[tuple[int, Any, str]], clips: bool, rule: Consistency
) -> None:
    """Whatever the order and the numbers in it, of workers and of a server of another group: what cannot be is
    dropped."""
    model, _ = make_words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheme = describe(model, optimizer, 1, GROUP_BYTES)
    params = torch.zeros(scheme.layout.length)
    own: Any = SimpleNamespace(params=params)
    exchange = Exchange(SERVER_GROUP, scheme.groups, 1, own, {}) if rule.server_groups > 1 else None
    dispatcher = make_dispatcher(
        scheme.groups,
        scheme.layout,
        optimizer,
        params,
        Clocks(rule, range(WORKERS)),
        local_grads=lambda worker: torch.zeros_like(params),
        copies=range(WORKERS),
        clips=clips and rule.gathers,
        exchange=exchange,
    )
    mouth: Any = _Mouth()
    server = Server(
        dispatcher,
        [mouth],
        PeerPort((), lambda number: pytest.fail("there is no peer to reach")),
        Participants(
            workers=frozenset(range(WORKERS)),
            local=frozenset(),
            peers=frozenset([PEER] if exchange else []),
        ),
        digest=0,
    )
    numbers = itertools.count(1)
    for worker in (*range(WORKERS), PEER):
        mouth.next = (worker, encode(Hello(number=next(numbers), worker=worker, digest=0)), None)
        assert server._listen()
    for worker, message, payload in told:
        message = msgspec.structs.replace(message, number=next(numbers))
        size = 0
        with contextlib.suppress(NotAMessage):
            size = dispatcher.expects(message) or 0
        vector = torch.zeros(size if payload == "right" else max(0, size - 4), dtype=torch.uint8)
        mouth.next = (worker, encode(message), None if payload == "none" else vector)
        assert server._listen()


def test_the_local_port_wants_the_secret_of_the_memory() -> None:
    from manyhands.servers.transport.local_socket import LocalConnection, LocalPort

    arena = Arena(os.memfd_create("test"))
    memory = HostMemory(arena, Sizes(length=16, dtype=torch.float32, groups=1, workers=1))
    port = LocalPort(memory, 0)
    before = strangers()
    try:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + _name(memory, 0, memory.secret(0)))
        stranger.send(b"\x00nonsense")
        assert list(port.take()) == []
        liar = LocalConnection(memory, 0)
        liar.send(encode(Hello(number=1, worker=0, digest=0, secret=bytes(16))))
        assert list(port.take()) == []
        with pytest.raises(PeerLost):
            liar.take(wait=True)
        worker = LocalConnection(memory, 0)
        worker.send(encode(Hello(number=1, worker=0, digest=0, secret=worker.secret)))
        worker.send(b"x" * 100_000)  # longer than one part
        assert [content[:1] for _, content, _ in (*port.take(), *port.take())][1] == b"x"
        assert strangers() - before == 2
        worker.close()
        with pytest.raises(PeerLost, match="worker 0"):
            list(port.take())
        stranger.close()
        liar.close()
    finally:
        port.close()
        arena.close()


def test_two_who_have_much_to_say_at_once_both_come_to_an_end() -> None:
    """Numbers of many rows: a server that waits until a worker listens, and a worker that speaks meanwhile."""
    from manyhands.servers.transport.local_socket import LocalConnection, LocalPort

    arena = Arena(os.memfd_create("test"))
    memory = HostMemory(arena, Sizes(length=16, dtype=torch.float32, groups=1, workers=1))
    port = LocalPort(memory, 0)
    worker = LocalConnection(memory, 0)
    much = bytes(3_000_000)
    heard: list[bytes] = []

    def serve() -> None:
        port.send(0, much, None)
        while len(heard) < 1:
            heard.extend(content for _, content, _ in port.take())

    try:
        worker.send(encode(Hello(number=1, worker=0, digest=0, secret=worker.secret)))
        while not list(port.take()):
            pass
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        worker.send(much)
        assert worker.take(wait=True) == (much, None)
        server.join(20)
        assert heard == [much]
    finally:
        worker.close()
        port.close()
        arena.close()
