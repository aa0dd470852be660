"""The doors of a server: garbage, truncated and replayed frames, wrong keys and strangers change and stop nothing."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands import telemetry
from manyhands.cluster.hosts import Neighbourhood
from manyhands.cluster.seat import Seat
from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost
from manyhands.servers import joining, messages
from manyhands.servers.client import Servers
from manyhands.servers.consistency import ASYNC, SYNC, Rule
from manyhands.servers.memory import Memory
from manyhands.servers.messages import Finish, Hello, NotAMessage, Pull, Push, encode
from manyhands.servers.near import _address
from manyhands.servers.party import own_party
from manyhands.servers.scheme import Scheme, describe
from manyhands.servers.wire import WireLine, make_keys

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

    def step(self, seed: int) -> None:
        """One step of both workers, each with a gradient of its own."""
        for worker, servers in enumerate(self.workers):
            servers.wait()
            servers.grads.copy_(gradient(self.scheme, seed, worker))
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


@contextlib.contextmanager
def running(rule: Rule) -> Iterator[Running]:
    store = dist.HashStore()
    size = WORKERS + 1
    hosts = tuple(
        (rank,) for rank in range(size)
    )  # each a host of its own: nothing in common but the network
    seats = [Seat(rank=rank, size=size, servers=1, launcher="test") for rank in range(size)]
    fds = [os.memfd_create("test") for _ in seats]
    errors: list[BaseException] = []

    def serve() -> None:
        model, optimizer = make_model()
        places = Neighbourhood(hosts=hosts, memory_fd=fds[-1], store=store)
        station: Any = SimpleNamespace(seat=seats[-1], neighbours=places, arena=Arena(fds[-1]))
        try:
            joining.serve(station, model, optimizer, rule, group_bytes=GROUP_BYTES)
        except BaseException as error:
            errors.append(error)
        station.arena.close()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    model, optimizer = make_model()
    scheme = describe(model, optimizer, 1, GROUP_BYTES)
    found: list[Servers] = [None] * WORKERS  # type: ignore[list-item]

    def join(rank: int) -> None:
        places = Neighbourhood(hosts=hosts, memory_fd=fds[rank], store=store)
        arena = Arena(fds[rank])
        party = own_party(seats[rank], places, rule.parties)
        vectors = joining.own_vectors(party, arena, scheme, rule, rank, joining.ordinary)
        found[rank] = joining.connect(party, arena, scheme, rule, vectors)
        replica: Any = SimpleNamespace(
            arrived=[1] * len(scheme.layout.places),
            used=torch.ones(len(scheme.layout.places)),
            optimizer=optimizer,
            layout=scheme.layout,
        )
        found[rank].bind(replica)

    joins = [threading.Thread(target=join, args=(rank,)) for rank in range(WORKERS)]
    for thread in joins:
        thread.start()
    for thread in joins:
        thread.join(20)
    world = Running(scheme=scheme, store=store, workers=found, errors=errors)
    world.workers[0].put("params", torch.zeros(scheme.layout.length))
    try:
        yield world
        for servers in world.workers:
            servers.close()
        server.join(20)
        assert not server.is_alive()
        assert not errors, errors
    finally:
        for fd in fds[:-1]:
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
    line: Any = servers._lines[0]
    numbers = servers._numbers
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


def test_a_replayed_push_is_applied_once() -> None:
    before = dropped()
    with running(ASYNC) as world:
        line: Any = world.workers[0]._lines[0]
        sent: list[Any] = []
        send = line._socket.send_multipart
        line._socket.send_multipart = lambda frames, **more: (
            sent.append(list(map(bytes, frames))),
            send(frames, **more),
        )
        world.step(0)
        del line._socket.send_multipart
        world.params()
        for frames in sent:
            line._socket.send_multipart(frames)
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
    line = WireLine(0, place, key, make_keys())
    line._socket.linger = 0
    line.send(encode(Hello(number=1, worker=0, digest=0)))
    assert not line._socket.poll(300)
    line.close()


def with_another_servers_key(place: str, key: bytes) -> None:
    line = WireLine(0, place, make_keys()[0], make_keys())
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


def test_a_server_listens_on_one_interface_only() -> None:
    with running(ASYNC) as world:
        assert world.endpoint[0].startswith("tcp://127.0.0.1:")


def test_a_worker_that_is_gone_is_noticed_by_the_server() -> None:
    with contextlib.suppress(AssertionError), running(ASYNC) as world:
        line: Any = world.workers[1]._lines[0]
        line._socket.linger = 0
        line.close()
        for _ in range(200):
            if world.errors:
                break
            threading.Event().wait(0.05)
        world.workers[1]._closed = True
    assert isinstance(world.errors[0], PeerLost)
    assert "worker 1" in str(world.errors[0])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.binary(max_size=300))
def test_bytes_are_a_message_or_not(content: bytes) -> None:
    with contextlib.suppress(NotAMessage):
        assert encode(messages.request(content))
    with contextlib.suppress(NotAMessage):
        assert encode(messages.answer(content))


def test_the_near_door_wants_the_secret_of_the_memory() -> None:
    from manyhands.servers.near import NearLine, NearPort

    arena = Arena(os.memfd_create("test"))
    memory = Memory(arena, length=16, dtype=torch.float32, groups=1, workers=1, states=())
    port = NearPort(memory, 0)
    before = strangers()
    try:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(_address(memory, 0))
        stranger.send(b"\x00nonsense")
        assert list(port.take()) == []
        liar = NearLine(memory, 0)
        liar.send(encode(Hello(number=1, worker=0, digest=0, secret=bytes(16))))
        assert list(port.take()) == []
        with pytest.raises(PeerLost):
            liar.take(wait=True)
        worker = NearLine(memory, 0)
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
