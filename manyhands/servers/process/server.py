"""The loop of a server process: hear, check, hand to the shard, answer; until every worker has said goodbye."""

import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from manyhands import telemetry
from manyhands.errors import PeerLost
from manyhands.servers.process.peer_servers import PeerPort
from manyhands.servers.process.shard import Shard
from manyhands.servers.protocol.consistency import OutOfTurn
from manyhands.servers.protocol.messages import (
    Answer,
    Done,
    Forward,
    Forwarded,
    Gain,
    Hello,
    Level,
    NotAMessage,
    Refusal,
    Request,
    WorkerBye,
    encode,
    request,
)

_LAST_NUMBER = 1 << 62  # of a message: whoever says goodbye says nothing after it
_PATIENCE_MS = 100
_RECORD_PERIOD_S = 0.5


class Port(Protocol):
    """Where messages come in and answers go out."""

    def fds(self) -> Iterator[int]: ...

    def take(self) -> Iterator[tuple[int, bytes, Tensor | None]]: ...

    def send(self, worker: int, content: bytes, vector: Tensor | None) -> None: ...

    def forget(self, worker: int) -> None: ...

    def hang_up(self) -> Iterable[int]: ...

    def close(self, *, linger: bool = True) -> None: ...


class Server:
    """One server: its shard, and the ports through which the workers reach it.

    Guests are its counterparts in other server groups. They are heard like workers, through a port of ours or, where we
    have gone to them, through `lines`; and they want to be said goodbye to. Peers are the servers that have copies of
    what this one owns, and those of whose groups it has copies: each is a number of its own, and none waits for a
    goodbye. `check` is called now and then, and may raise.
    """

    def __init__(
        self,
        shard: Shard,
        ports: Sequence[Port],
        *,
        near: set[int],
        workers: Iterable[int],
        guests: Iterable[int],
        lines: PeerPort,
        digest: int,
        survives: bool = False,
        peers: Iterable[int] = (),
        check: Callable[[], None] = lambda: None,
        generation: int = 0,
    ) -> None:
        self._survives = survives  # whether workers may die, and others come in their place
        self._generation = generation
        self._shard = shard
        self._ports = [*ports, lines]
        self._near = near
        self._digest = digest
        self._expected = set(workers)
        self._guests = frozenset(guests)
        self._peers = frozenset(peers)
        self._check = check
        self._gone: set[int] = set()  # guests that have said goodbye
        self._waiting: list[tuple[int, int]] = []  # workers not let in before all guests, and their greetings
        self._has_left = False
        self._record_at = 0.0
        self._port_of: dict[int, Port] = dict.fromkeys(lines.numbers, lines)
        self._last = dict.fromkeys(
            self._expected | self._guests | self._peers, 0
        )  # the number of each one's last message

    def run(self) -> None:
        """Serve until all workers have said goodbye."""
        for guest in self._guests & self._port_of.keys():
            self._reunite(guest)
        while self._expected:
            self._take_turn()
        for guest in self._guests:
            self._send(guest, WorkerBye(number=_LAST_NUMBER), None)
        self._has_left = True
        for guest in self._gone:
            self._port_of[guest].forget(guest)
        while self._gone < self._guests:
            self._take_turn()
        self._record(now=True)

    def _take_turn(self) -> None:
        self._check()
        if not self._listen():
            self._sleep()
        self._record()

    def close(self, *, linger: bool = True) -> None:
        """Without `linger`, what has not left by now does not leave."""
        for port in self._ports:
            port.close(linger=linger)

    def _listen(self) -> bool:
        """Deal with what has come; says whether there was anything."""
        heard = False
        for port in self._ports:
            for worker, content, payload in self._taken(port):
                heard = True
                try:
                    self._deal_with(port, worker, request(content), payload)
                except (NotAMessage, OutOfTurn) as error:
                    if worker in self._near:
                        raise  # nobody but our own code can have said it
                    telemetry.count("frames_dropped", 1)
                    telemetry.event("dropped", worker=worker, reason=str(error))
        return heard

    def _taken(self, port: Port) -> Iterator[tuple[int, bytes, Tensor | None]]:
        """What has come; a worker that is gone ends its generation, and a guest that is gone comes again."""
        try:
            yield from port.take()
        except PeerLost:
            if not self._survives:
                raise
            for guest in port.hang_up():
                self._last[guest] = 0
                self._reunite(guest)

    def _record(self, *, now: bool = False) -> None:
        """Now and then: how stale the gradients of the updates were, as counts."""
        time_s = time.monotonic()
        if (now or time_s >= self._record_at) and (news := self._shard.news()):
            telemetry.event("updates", **news)
            self._record_at = time_s + _RECORD_PERIOD_S

    def _sleep(self) -> None:
        poll = select.poll()
        for port in self._ports:
            for fd in port.fds():
                poll.register(fd, select.POLLIN)
        with telemetry.timed("wait"):
            poll.poll(_PATIENCE_MS)

    def _deal_with(self, port: Port, worker: int, message: Request, payload: Tensor | None) -> None:
        if isinstance(message, Hello) and message.generation > self._generation:
            self._regroup(message)
        if isinstance(message, Hello) and worker in self._guests and self._survives:
            self._last[worker] = 0  # another has taken its place
        if worker not in self._last or message.number <= self._last[worker]:
            raise NotAMessage(f"number {message.number} after {self._last.get(worker)}")
        if isinstance(message, Hello):
            self._welcome(port, worker, message)
        elif self._port_of.get(worker) is not port:
            raise NotAMessage("it has not said who it is")
        elif isinstance(message, WorkerBye):
            if worker in self._expected or self._has_left:
                port.forget(worker)  # a guest still waits for our goodbye otherwise
            self._expected.discard(worker)
            self._gone.update(self._guests & {worker})
        elif (worker in self._guests) != isinstance(message, (Gain, Level)):
            raise NotAMessage("servers tell each other what they have added, and workers everything else")
        elif (worker in self._peers) != isinstance(message, (Forward, Forwarded)):
            raise NotAMessage("updates are forwarded by servers, and by nobody else")
        else:
            vector = self._checked(worker, message, payload)
            for to, answer, attached in self._shard.handle(worker, message, vector):
                self._send(to, answer, attached)
        self._last[worker] = message.number

    def _regroup(self, hello: Hello) -> None:
        """The first worker of a new generation: those before are over."""
        self._generation = hello.generation
        workers = range(hello.workers)
        self._expected, self._near = set(workers), set(workers) | self._guests
        self._last = {guest: self._last[guest] for guest in self._guests} | dict.fromkeys(workers, 0)
        self._port_of = {who: port for who, port in self._port_of.items() if who in self._guests}
        self._waiting.clear()
        self._shard.regroup(workers, hello.generation)

    def _welcome(self, port: Port, worker: int, hello: Hello) -> None:
        if hello.worker != worker:
            raise NotAMessage(f"worker {worker} says that it is worker {hello.worker}")
        self._port_of[worker] = port
        if hello.digest != self._digest:
            reason = f"worker {worker} has another model or optimizer than the servers; build the same on all"
            port.send(worker, encode(Refusal(reason=reason)), None)
        elif worker in self._guests:
            self._reunite(worker)
        elif worker not in self._peers:
            self._waiting.append((worker, hello.number))
        if self._guests <= self._port_of.keys():
            for number, said in self._waiting:
                self._send(number, Done(number=said), None)
            self._waiting.clear()

    def _reunite(self, guest: int) -> None:
        """A guest is here, perhaps again, or another in its place: what it may not have heard."""
        for to, message, vector in self._shard.reunite(guest):
            self._send(to, message, vector)
        if self._has_left:
            self._send(guest, WorkerBye(number=_LAST_NUMBER), None)

    def _checked(self, worker: int, message: Request, payload: Tensor | None) -> Tensor | None:
        """The vector that belongs to a message; its size is known beforehand."""
        size = self._shard.expects(message)
        if size is None:
            raise NotAMessage("it is about what this server does not own")
        if worker in self._near:
            return None
        if size != (0 if payload is None else payload.numel()):
            raise NotAMessage(f"{0 if payload is None else payload.numel()} bytes instead of {size}")
        return None if payload is None else payload.view(self._shard.dtype)

    def _send(self, worker: int, answer: Answer | Request, vector: Tensor | None) -> None:
        port = self._port_of.get(worker)
        if port:  # else a guest that is not here: it will hear when it comes
            port.send(worker, encode(answer), None if worker in self._near else vector)
