"""Connections that another thread can cut."""

import socket
import threading

import pytest

from manyhands.comm.transports.connections import Connections
from manyhands.errors import PeerLost


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_cutting_ends_a_wait_on_what_was_connected_inside_and_nothing_else() -> None:
    connections, before = Connections(), connected()
    with connections.drawing() as ports:
        ours, theirs = connected()
        others: list[tuple[socket.socket, socket.socket]] = []
        loader = threading.Thread(target=lambda: others.append(connected()))  # to somewhere else, meanwhile
        loader.start()
        loader.join(10)
        ports.add(theirs.getsockname()[1])
    heard: list[bytes] = []
    waiting = threading.Thread(target=lambda: heard.append(ours.recv(1)))
    waiting.start()
    connections.cut()
    waiting.join(10)
    assert heard == [b""]
    before[1].sendall(b"!")
    assert before[0].recv(1) == b"!"
    others[0][1].sendall(b"!")
    assert others[0][0].recv(1) == b"!"
    for one in (*before, *others[0], ours, theirs):
        one.close()


def test_a_connection_to_the_spared_address_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = Connections(listener.getsockname())
        with connections.drawing(listener.getsockname()[1]):
            ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
        connections.cut()
        theirs.sendall(b"!")
        assert ours.recv(1) == b"!"
        ours.close()
        theirs.close()


def test_what_is_connected_after_the_cut_is_of_no_use() -> None:
    connections = Connections()
    connections.cut()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        with pytest.raises(PeerLost, match="over before"), connections.drawing(place[1]):
            ours = socket.create_connection(place)
        assert ours.recv(1) == b""
        ours.close()
