"""Messages between the processes of one host: a socket in the kernel, for headers alone.

Vectors lie in common memory. The socket has an abstract name, so nothing stays on disk, and each server makes the name
from a secret that it writes in the common memory: no other user can know it before. A server takes connections of the
same user only, and a message only after that secret. Messages arrive whole (SOCK_SEQPACKET), so an unauthenticated
process can send nonsense, but no half of a message. A server hears at once of a worker that dies.
"""

import contextlib
import hashlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports import peer_user
from manyhands.errors import PeerLost
from manyhands.servers.protocol.messages import Hello, NotAMessage, request
from manyhands.servers.transport.host_memory import HostMemory

Said = tuple[int, bytes, None]  # the worker, the header; the vector is in common memory

_PART_BYTES = 1 << 16
_MORE, _LAST = b"\x01", b"\x00"  # a header that is longer comes in parts
_CONNECT_S = 300.0
_PATIENCE_MS = 100  # how long to wait for an answer before asking whether it is still to come


def _name(memory: HostMemory, server: int, secret: bytes) -> str:
    """All users can read it as long as the server listens, so the secret itself is not in it."""
    place = f"{memory.name()}/{server}"
    return f"manyhands/{hashlib.blake2b(place.encode(), key=secret, digest_size=16).hexdigest()}"


def _parts(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), _PART_BYTES):
        last = start + _PART_BYTES >= len(content)
        yield (_LAST if last else _MORE) + content[start : start + _PART_BYTES]


class _Inbox:
    """Whole headers out of one connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._parts: list[bytes] = []

    def take(self) -> bytes | None:
        """The next header; None if there is none yet. Raises EOFError when the other side is gone."""
        while True:
            try:
                part = self.link.recv(1 + _PART_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError:
                raise EOFError from None
            if not part:
                raise EOFError
            self._parts.append(part[1:])
            if part[:1] == _LAST:
                whole, self._parts = b"".join(self._parts), []
                return whole


class LocalPort:
    """A server's side: one connection for each worker of its host, and for each peer server that comes to it."""

    def __init__(self, memory: HostMemory, server: int, peers: Collection[int] = ()) -> None:
        self._peers = peers  # generations are not their business
        self._secret = memory.make_secret(server)
        self._listener = peer_user.listen(_name(memory, server, self._secret), socket.SOCK_SEQPACKET)
        self._unauthenticated: list[_Inbox] = []
        self._workers: dict[int, _Inbox] = {}
        self._generation = 0

    def fds(self) -> Iterator[int]:
        yield self._listener.fileno()
        for inbox in (*self._unauthenticated, *self._workers.values()):
            yield inbox.link.fileno()

    def take(self) -> Iterator[Said]:
        """At most one message from each worker, so that none waits for another's many."""
        self._unauthenticated += map(_Inbox, peer_user.accept(self._listener))
        for inbox in list(self._unauthenticated):
            yield from self._introduced(inbox)
        for worker, inbox in list(self._workers.items()):
            try:
                content = inbox.take()
            except EOFError:
                inbox.link.close()
                del self._workers[worker]
                raise PeerLost(f"worker {worker} is gone without a word") from None
            if content is not None:
                yield worker, content, None

    def _introduced(self, inbox: _Inbox) -> Iterator[Said]:
        """A connection becomes a worker's by the secret in its first message; until then it is unauthenticated."""
        try:
            content = inbox.take()
            if content is None:
                return
            said = request(content)
            if not isinstance(said, Hello) or said.secret != self._secret:
                raise NotAMessage("the wrong secret")
            if said.generation > self._generation:
                yield from self._drain()
                self._generation = said.generation
            if said.worker in self._peers:
                self.forget(said.worker)  # another comes in its place
            elif said.worker in self._workers or said.generation < self._generation:
                raise NotAMessage("another worker has this place")
        except (EOFError, NotAMessage):
            telemetry.count("strangers", 1)
            self._unauthenticated.remove(inbox)
            inbox.link.close()
            return
        self._unauthenticated.remove(inbox)
        self._workers[said.worker] = inbox
        yield said.worker, content, None

    def _drain(self) -> Iterator[Said]:
        """All that the workers of a generation that is over have left to be read."""
        for worker, inbox in self._own_workers():
            with contextlib.suppress(EOFError):
                while (content := inbox.take()) is not None:
                    yield worker, content, None
            self.forget(worker)

    def _own_workers(self) -> list[tuple[int, _Inbox]]:
        return [(worker, inbox) for worker, inbox in self._workers.items() if worker not in self._peers]

    def hang_up(self) -> Iterable[int]:
        """Workers that wait for an answer wait in vain; what they have sent can still be read."""
        for _, inbox in self._own_workers():
            with contextlib.suppress(OSError):
                inbox.link.shutdown(socket.SHUT_WR)
        return ()

    def send(self, worker: int, content: bytes, vector: Tensor | None) -> None:
        # That it is gone is noticed when we next listen to it.
        with contextlib.suppress(BrokenPipeError, ConnectionError, KeyError):
            for part in _parts(content):
                self._workers[worker].link.send(part)

    def forget(self, worker: int) -> None:
        """A worker that has said goodbye."""
        inbox = self._workers.pop(worker, None)
        if inbox:
            inbox.link.close()

    def close(self, *, linger: bool = True) -> None:
        for inbox in (*self._unauthenticated, *self._workers.values()):
            inbox.link.close()
        self._listener.close()


class LocalConnection:
    """A worker's side of the connection with a server of its host; `check` is called while waiting, and may raise."""

    def __init__(self, memory: HostMemory, server: int, check: Callable[[], None] = lambda: None) -> None:
        self.server = server
        self._check = check
        self._link, self.secret = _connected(memory, server, check)
        self._inbox = _Inbox(self._link)
        self._answers: deque[bytes] = deque()  # heard while there was no room to speak

    def send(self, content: bytes, vector: Tensor | None = None) -> None:
        """Where there is no room, what the server says is heard meanwhile: it may itself be waiting for room."""
        for part in _parts(content):
            while not self._sent(part):
                while (said := self._heard(wait=False)) is not None:
                    self._answers.append(said)
                self._await(select.POLLIN | select.POLLOUT)

    def _sent(self, part: bytes) -> bool:
        try:
            self._link.send(part, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            raise self._lost() from None
        return True

    def take(self, *, wait: bool) -> tuple[bytes, None] | None:
        """The next answer; without `wait`, None if there is none yet."""
        content = self._answers.popleft() if self._answers else self._heard(wait=wait)
        return None if content is None else (content, None)

    def _heard(self, *, wait: bool) -> bytes | None:
        try:
            content = self._inbox.take()
            while content is None and wait:
                self._await(select.POLLIN)
                content = self._inbox.take()
            return content
        except EOFError:
            raise self._lost() from None

    def _await(self, events: int) -> None:
        """Until there is news, or nothing to wait for any more."""
        poll = select.poll()
        poll.register(self._link, events)
        if not poll.poll(_PATIENCE_MS):
            self._check()

    def fds(self) -> Iterator[int]:
        yield self._link.fileno()

    def _lost(self) -> PeerLost:
        return PeerLost(f"server {self.server} is gone")

    def close(self, *, linger: bool = True) -> None:
        self._link.close()


def _connected(memory: HostMemory, server: int, check: Callable[[], None]) -> tuple[socket.socket, bytes]:
    """The connection and the server's secret. The server may still be starting: try until it listens.

    A server that comes in the place of another has a secret of its own, and so a name of its own.
    """
    deadline = time.monotonic() + _CONNECT_S
    while True:
        secret = memory.secret(server)
        link = (
            peer_user.connect(_name(memory, server, secret), socket.SOCK_SEQPACKET) if any(secret) else None
        )
        if link is not None:
            return link, secret
        if time.monotonic() > deadline:
            raise PeerLost(f"server {server} did not come within {_CONNECT_S:.0f} s")
        check()
        time.sleep(0.01)
