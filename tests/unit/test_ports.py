"""The port of a meeting place belongs to the run from the moment it is chosen."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import zmq

from manyhands.cluster.launchers import addresses
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker import rendezvous
from manyhands.comm.transports.connections import listening_ports, refuse_newcomers
from manyhands.comm.transports.listeners import listeners_of
from manyhands.errors import UsageError
from tests.hygiene import LISTENING


@pytest.fixture(autouse=True)
def gives_back() -> Iterator[None]:
    yield
    while addresses._held:
        addresses._held.popitem()[1].close()


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_no_other_process_gets_a_port_that_was_chosen(address: str) -> None:
    port = addresses.hold_port(address)
    for reuses in (0, 1):  # a port that is only bound would be given to a process that sets it
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
            with pytest.raises(OSError, match="in use") as refused:
                other.bind(("127.0.0.1", port))
            assert refused.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_the_store_and_the_coordinator_listen_at_it(address: str) -> None:
    port = addresses.hold_port(address)
    place = RankInfo(rank=0, size=1, launcher="test", store=f"127.0.0.1:{port}", serves=True)
    store = rendezvous._meeting_place(place)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening_at(port) == {address or "0.0.0.0"}
    del store
    port = addresses.hold_port(address)
    listener = addresses.take_over(port)
    assert listener
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.USE_FD, listener.detach())
        router.bind(f"tcp://127.0.0.1:{port}")
        socket.create_connection(("127.0.0.1", port)).close()


def test_the_store_of_a_generation_listens_at_the_address_of_its_host_alone() -> None:
    store = rendezvous.open_meeting_place("127.0.0.1")
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"
    assert listening_at(store.port) == {"127.0.0.1"}


def test_a_store_in_memory_opens_no_port() -> None:
    before, fd = listening_ports(), rendezvous.anonymous_memory()
    try:
        one, other = (rendezvous.store_in_memory(os.getpid(), fd) for _ in range(2))
        one.set("key", "value")
        assert other.get("key") == b"value"
        assert listening_ports() == before
    finally:
        os.close(fd)


def test_a_store_at_which_all_have_met_takes_no_others_and_goes_on() -> None:
    """Connections from before stay; the kernel says of which process's listener it is so."""
    store = rendezvous.open_meeting_place("127.0.0.1")
    member = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    (before,) = (one for one in listeners_of(os.getpid()) if one.port == store.port)
    refuse_newcomers([store.port])
    (after,) = (one for one in listeners_of(os.getpid()) if one.port == store.port)
    assert (before.is_closed, after.is_closed) == (False, True)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", store.port), timeout=0.3)
    member.set("key", "value")
    assert store.get("key") == b"value"
    spent_s = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - spent_s < 0.1, "the store's thread does not spin"


def listening_at(port: int) -> set[str]:
    """The addresses of this host at which a process waits for connections to this port."""
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            place, _, number = words[1].partition(":")
            if words[3] == LISTENING and int(number, 16) == port:
                raw = bytes.fromhex(place)
                found.add(
                    socket.inet_ntop(family, b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
                )
    return found


def test_a_port_at_which_someone_listens_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 cannot be had"):
            addresses.meeting_address(f"127.0.0.1:{port}")
    assert addresses.meeting_address(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
