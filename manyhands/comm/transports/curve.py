"""Which processes may connect over ZeroMQ: CURVE keys made for the run, and the authenticator that checks them.

Everything is encrypted and authenticated by these keys; any other process gets no further than the handshake.
"""

from collections.abc import Mapping

import zmq
from zmq.utils import z85

from manyhands import telemetry

HANDSHAKE_MS = 10_000  # how long a connection may take to prove who it is

_BEAT_MS = 500
_SILENCE_MS = 2_000  # after which a connection is made anew: it may have been cut without a word

Keys = tuple[bytes, bytes]

make_keys = zmq.curve_keypair
"""A public and a secret key."""


class Authenticator:
    """ZeroMQ's authentication protocol: a known public key is let in under a name of ours, all others stay out."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.allowed: Mapping[bytes, str] = {}
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def guard(self, socket: "zmq.Socket[bytes]", keys: Keys) -> None:
        """Have a listening socket ask here; before it is bound."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.zap_domain = b"manyhands"

    def answer(self) -> None:
        """Answer every handshake that waits."""
        while True:
            try:
                asked = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, number, _domain, _address, _identity, mechanism, *credentials = asked
            known = mechanism == b"CURVE" and len(credentials) == 1
            name = self.allowed.get(z85.encode(credentials[0])) if known else None
            if name is None:
                telemetry.count("strangers", 1)
                self.socket.send_multipart([version, number, b"400", b"no", b"", b""])
            else:
                self.socket.send_multipart([version, number, b"200", b"OK", name.encode(), b""])

    def close(self) -> None:
        self.socket.close()


def watch(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Have a socket notice connections that carry nothing any more; before it is bound or connected."""
    if endpoint.startswith("tcp://"):  # inside a host there is nothing that could be cut
        socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _SILENCE_MS)


def introduce(socket: "zmq.Socket[bytes]", server_key: bytes, keys: Keys) -> None:
    """Have a connecting socket prove who it is; before it is connected."""
    socket.curve_serverkey = server_key
    socket.curve_publickey, socket.curve_secretkey = keys
