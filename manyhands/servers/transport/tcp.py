"""Messages between hosts: ZeroMQ with CURVE keys made for the run.

A server answers only to the workers whose public keys it was told, and everything is encrypted and authenticated by
those keys: any other process that connects gets no further than the handshake. Vectors are sent from where they lie
and used where they arrived, without a copy of ours.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from manyhands import telemetry
from manyhands.comm.transports.curve import Authenticator, Keys, introduce, make_keys
from manyhands.errors import PeerLost

__all__ = ["TcpConnection", "TcpPort", "make_keys"]

_LARGEST_BYTES = 1 << 30
_LINGER_MS = 2_000  # how long the last messages may take to leave
_PATIENCE_MS = 200
_CONNECT_S = 300.0

Said = tuple[int, bytes, Tensor | None]  # the worker, the header, and the vector as bytes


def _frames(content: bytes, vector: Tensor | None) -> list[Any]:
    """What ZeroMQ sends: the header, and the vector's memory as it is."""
    frames = [content] if vector is None else [content, vector.view(torch.uint8).numpy()]
    telemetry.count("bytes_sent", sum(len(frame) for frame in frames))
    return frames


def _tensor_of(frame: zmq.Frame) -> Tensor:
    if not len(frame):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(frame.buffer, dtype=torch.uint8)


class TcpPort:
    """A server's side: one socket for all workers of other hosts."""

    def __init__(self, address: str, keys: Keys) -> None:
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, _LINGER_MS),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),  # at most one push of each group is under way, so nothing piles up
            (zmq.MAXMSGSIZE, _LARGEST_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, ":" in address),
        ):
            self._socket.setsockopt(option, value)
        self._authenticator.guard(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        place = f"[{address}]" if ":" in address else address
        self._socket.bind(f"tcp://{place}:*")
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        telemetry.event("listens", pid=os.getpid(), port=int(self.endpoint.rpartition(":")[2]))
        self._identities: dict[int, bytes] = {}

    def allow(self, keys: Mapping[bytes, int]) -> None:
        """From now on these public keys may connect, each as the worker of this number."""
        self._authenticator.allowed = {key: str(worker) for key, worker in keys.items()}

    def fds(self) -> Iterator[int]:
        for part in (self._socket, self._authenticator.socket, self._monitor):
            yield int(part.getsockopt(zmq.FD))

    def take(self) -> Iterator[Said]:
        """What has come; every socket is emptied, since its descriptor tells of news only once."""
        self._authenticator.answer()
        yield from self._messages()
        if self._was_closed():
            gone = [worker for worker in self._identities if not self._reaches(worker)]
            yield from self._messages()  # a worker that has gone may have said goodbye before
            for worker in gone:
                if worker in self._identities:
                    raise self._lost(worker)

    def _messages(self) -> Iterator[Said]:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                worker = int(frames[-1].get("User-Id"))
            except (zmq.ZMQError, ValueError):
                worker = -1
            if worker < 0 or len(frames) not in (2, 3):
                telemetry.count("frames_dropped", 1)
                continue
            telemetry.count("bytes_received", sum(len(frame) for frame in frames[1:]))
            self._identities[worker] = frames[0].bytes
            yield worker, frames[1].bytes, _tensor_of(frames[2]) if len(frames) == 3 else None

    def _was_closed(self) -> bool:
        """Whether a connection was closed since the last time; the socket does not say whose."""
        closed = False
        with contextlib.suppress(zmq.Again):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                closed = True
        return closed

    def send(self, worker: int, content: bytes, vector: Tensor | None) -> None:
        if not self._reaches(worker, _frames(content, vector)):
            raise self._lost(worker)

    def _reaches(self, worker: int, parts: Sequence[Any] = (b"",)) -> bool:
        """Send to a worker, by default nothing but the question whether it is still there."""
        try:
            self._socket.send_multipart([self._identities[worker], *parts], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _lost(self, worker: int) -> PeerLost:
        return PeerLost(f"the connection with worker {worker} is gone")

    def forget(self, worker: int) -> None:
        """A worker that has said goodbye may close its connection."""
        self._identities.pop(worker, None)

    def hang_up(self) -> NoReturn:
        """Between hosts a generation ends with its first death."""
        raise PeerLost("a worker of another host is gone")

    def close(self, *, linger: bool = True) -> None:
        self._socket.disable_monitor()
        for part in (self._monitor, self._authenticator):
            part.close()
        self._socket.close(None if linger else 0)
        self._context.term()


class TcpConnection:
    """A worker's side of the connection with a server of another host."""

    secret = b""

    def __init__(
        self,
        server: int,
        endpoint: str,
        key: bytes,
        keys: Keys,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.server = server
        self._check = check  # called while waiting, and may raise
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, _LINGER_MS),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, _LARGEST_BYTES),
            (zmq.IPV6, "[" in endpoint),
        ):
            self._socket.setsockopt(option, value)
        introduce(self._socket, key, keys)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._socket.connect(endpoint)
        self._deadline = time.monotonic() + _CONNECT_S
        self._connected = False

    def send(self, content: bytes, vector: Tensor | None = None) -> None:
        """The vector may not change until the server has answered."""
        self._socket.send_multipart(_frames(content, vector), copy=False)

    def take(self, *, wait: bool) -> tuple[bytes, Tensor | None] | None:
        """The next answer and its vector; without `wait`, None if there is none yet."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if not wait:
                    return None
                self._sleep()
                continue
            telemetry.count("bytes_received", sum(len(frame) for frame in frames))
            if len(frames[0]):  # else the server only wanted to know whether we are here
                return frames[0].bytes, _tensor_of(frames[1]) if len(frames) == 2 else None

    def fds(self) -> Iterator[int]:
        yield int(self._socket.getsockopt(zmq.FD))

    def _sleep(self) -> None:
        """Until there is news; a connection that was closed does not come back."""
        ready = self._socket.poll(_PATIENCE_MS)
        if ready:
            return
        self._check()
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected = True
                elif self._connected:
                    raise PeerLost(f"the connection with server {self.server} is gone")
        if not self._connected and time.monotonic() > self._deadline:
            raise PeerLost(f"server {self.server} did not answer within {_CONNECT_S:.0f} s")

    def close(self, *, linger: bool = True) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(None if linger else 0)
        self._context.term()
