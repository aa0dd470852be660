"""What strangers and noise do to the coordinator: nothing."""

import os
import random
import time
from collections.abc import Iterator

import pytest
import zmq

from manyhands.cluster.coordinator.control import Here, Over, encode, to_member
from manyhands.cluster.launcher.coordination import Coordination, Elastic
from manyhands.comm.transports.curve import introduce, make_keys

PATIENCE_MS = 10_000


@pytest.fixture
def coordination() -> Iterator[Coordination]:
    with Coordination([0, 1], Elastic(most=2, replace=0, stall_s=60.0)) as made:
        yield made


class Client:
    """A client of the control port, with the right key or with another."""

    def __init__(self, coordination: Coordination, *, keys: tuple[bytes, bytes] | None = None) -> None:
        invitation = coordination.invitation
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        own = (invitation.public_key.encode(), invitation.secret_key.encode())
        introduce(self.socket, invitation.server_key.encode(), keys or own)
        self.socket.connect(invitation.endpoint)

    def answer(self, timeout_ms: int = PATIENCE_MS) -> object:
        return to_member(self.socket.recv()) if self.socket.poll(timeout_ms) else None

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def client(coordination: Coordination) -> Iterator[Client]:
    made = Client(coordination)
    yield made
    made.close()


def here(generation: int = 0, *, member: int = 0) -> bytes:
    return encode(
        Here(
            member=member,
            generation=generation,
            new_generation=None,
            waits=False,
            has_state=False,
            commits=0,
            steps=0,
        )
    )


def still_answers(coordination: Coordination, client: Client) -> bool:
    """It knows that worker 1 is gone, and says so."""
    coordination.tell_ended(1)
    client.socket.send(here())
    return client.answer() == Over(generation=0, gone=(1,))


def test_noise_is_dropped(coordination: Coordination, client: Client) -> None:
    draw = random.Random(1)
    whole = here()
    for _ in range(300):
        client.socket.send(draw.randbytes(draw.randrange(60)))
        client.socket.send(whole[: draw.randrange(len(whole))])
        client.socket.send_multipart([draw.randbytes(3) for _ in range(draw.randrange(1, 5))])
        torn = bytearray(whole)
        torn[draw.randrange(len(torn))] ^= 1 << draw.randrange(8)
        client.socket.send(bytes(torn[:4]) + b"\xc1" + bytes(torn[4:]))
    assert still_answers(coordination, client)


def test_an_old_generation_is_told_that_it_is_over(coordination: Coordination, client: Client) -> None:
    client.socket.send(here(-1, member=9))
    assert client.answer() == Over(generation=-1, gone=())
    assert still_answers(coordination, client)


def test_a_wrong_key_gets_no_answer(coordination: Coordination, client: Client) -> None:
    other = Client(coordination, keys=make_keys())
    try:
        other.socket.send(here(-1))
        assert still_answers(coordination, client)
        assert other.answer(300) is None
    finally:
        other.close()


def test_a_coordinator_that_dies_comes_again_at_the_same_place(
    coordination: Coordination, client: Client
) -> None:
    client.socket.send(here())
    os.kill(coordination.pid, 9)
    while coordination.take() is not None:
        time.sleep(0.01)
    assert coordination.start_again() == -9
    assert still_answers(coordination, client)
