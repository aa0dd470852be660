"""The port of a meeting place belongs to the run from the moment it is chosen."""

import errno
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist
import zmq

from manyhands.cluster.launchers import addresses
from manyhands.errors import UsageError


@pytest.fixture(autouse=True)
def gives_back() -> Iterator[None]:
    yield
    while addresses._held:
        addresses._held.pop().close()


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_no_other_process_gets_a_port_that_was_chosen(address: str) -> None:
    port = addresses.hold_port(address)
    with socket.socket() as other:
        with pytest.raises(OSError, match="in use") as refused:
            other.bind(("127.0.0.1", port))
        assert refused.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_the_store_and_the_coordinator_listen_at_it(address: str) -> None:
    port = addresses.hold_port(address)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    port = addresses.hold_port(address)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_port_at_which_someone_listens_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 cannot be had"):
            addresses.meeting_address(f"127.0.0.1:{port}")
    assert addresses.meeting_address(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
