"""What every transport must do; see `manyhands.comm.transports.transport`."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from manyhands.comm.transports.c10d import C10dTransport
from manyhands.comm.transports.transport import Transport
from manyhands.errors import PeerLost
from tests.worlds import GLOO, WORLDS, Died, World

LARGE = 4_000_000  # far more than any socket or ring buffer takes in


def in_order(transport: Transport) -> bool:
    """Messages of several sizes and types go round at once; everyone waits for the last one first."""
    types = (torch.float32, torch.float64, torch.int64, torch.uint8)
    sent = [torch.arange(length).to(dtype) for length in (1, 1000, 3) for dtype in types]
    received = [torch.zeros_like(vector) for vector in sent]
    sends = [transport.send((transport.rank + 1) % transport.size, vector) for vector in sent]
    receives = [transport.receive((transport.rank - 1) % transport.size, vector) for vector in received]
    for handle in reversed(sends + receives):
        handle.wait()
    return all(torch.equal(got, expected) for got, expected in zip(received, sent, strict=True))


def crossing(transport: Transport, sends_first: bool) -> list[bool]:
    """Everyone sends a large message to everyone; all wait for their sends first, or for their receives."""
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    mine = torch.full((LARGE,), float(transport.rank))
    theirs = [torch.empty(LARGE) for _ in peers]
    sends = [transport.send(peer, mine) for peer in peers]
    receives = [transport.receive(peer, into) for peer, into in zip(peers, theirs, strict=True)]
    for handle in sends + receives if sends_first else receives + sends:
        handle.wait()
    return [bool((into == peer).all()) for peer, into in zip(peers, theirs, strict=True)]


def trials(transport: Transport) -> dict[str, object]:
    """Every trial that all ranks survive, in one world: to start processes takes longer than to run them."""
    return {
        "in order": in_order(transport),
        "sends first": crossing(transport, sends_first=True),
        "receives first": crossing(transport, sends_first=False),
    }


def marked(world: World) -> object:
    return pytest.param(world, marks=[pytest.mark.processes] if world.processes else [], id=str(world))


@pytest.fixture(scope="module", params=map(marked, WORLDS))
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, object]]:
    results: list[dict[str, object]] = request.param.run(3, trials)
    return results


def test_messages_arrive_in_the_order_sent(outcomes: list[dict[str, object]]) -> None:
    assert [outcome["in order"] for outcome in outcomes] == [True, True, True]


@pytest.mark.parametrize("waiting", ["sends first", "receives first"])
def test_large_messages_cross_without_deadlock(outcomes: list[dict[str, object]], waiting: str) -> None:
    assert [outcome[waiting] for outcome in outcomes] == [[True, True]] * 3


def outlive(transport: Transport) -> list[str]:
    """Rank 1 dies in the middle of an exchange; rank 0 tells what it met, receiving and then sending."""
    go = torch.zeros(1)
    if transport.rank == 1:
        transport.receive(0, go).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    transport.send(1, go).wait()
    met = []
    for post in (transport.receive, transport.send):
        try:
            post(1, torch.zeros(LARGE)).wait()
        except PeerLost as error:
            met.append(str(error))
    return met


@pytest.mark.processes
@pytest.mark.parametrize("world", [world for world in WORLDS if world.processes], ids=str)
def test_a_killed_peer_is_named(world: World) -> None:
    met, died = world.run(2, outlive)
    assert died == Died(signal.SIGKILL)
    assert len(met) == 2
    assert all("worker 1 " in message for message in met)


def through_a_group(transport: Transport) -> list[float]:
    """Workers 1 and 2 form a group, in which they are ranks 0 and 1."""
    group = dist.new_group([1, 2])
    if transport.rank == 0:
        return []
    inner = C10dTransport(group)
    into = torch.zeros(1)
    receive = inner.receive(1 - inner.rank, into)
    inner.send(1 - inner.rank, torch.tensor([float(transport.rank)])).wait()
    receive.wait()
    return [inner.rank, inner.size, into.item()]


@pytest.mark.processes
def test_c10d_ranks_are_those_of_the_group() -> None:
    assert GLOO.run(3, through_a_group) == [[], [0, 2, 2.0], [1, 2, 1.0]]
