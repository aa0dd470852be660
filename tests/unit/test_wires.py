"""Connections that another thread can cut."""

import socket
import threading

import pytest

from manyhands.comm.transports.wires import Wires
from manyhands.errors import PeerLost


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        ours = socket.create_connection(door.getsockname())
        return ours, door.accept()[0]


def test_cutting_ends_a_wait_on_what_was_connected_inside_and_nothing_else() -> None:
    wires, before = Wires(), connected()
    with wires.drawing():
        ours, theirs = connected()
    heard: list[bytes] = []
    waiting = threading.Thread(target=lambda: heard.append(ours.recv(1)))
    waiting.start()
    wires.cut()
    waiting.join(10)
    assert heard == [b""]
    before[1].sendall(b"!")
    assert before[0].recv(1) == b"!"
    for one in (*before, ours, theirs):
        one.close()


def test_a_connection_to_the_spared_address_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        wires = Wires(door.getsockname())
        with wires.drawing():
            ours = socket.create_connection(door.getsockname())
        theirs = door.accept()[0]
        wires.cut()
        theirs.sendall(b"!")
        assert ours.recv(1) == b"!"
        ours.close()
        theirs.close()


def test_what_is_connected_after_the_cut_is_of_no_use() -> None:
    wires = Wires()
    wires.cut()
    with pytest.raises(PeerLost, match="over before"), wires.drawing():
        ours, theirs = connected()
    assert ours.recv(1) == b""
    ours.close()
    theirs.close()
