"""The loop of a server process: take messages, check them, hand them on, send answers; until every worker has left."""

import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from manyhands import telemetry
from manyhands.errors import PeerLost
from manyhands.servers.process.dispatcher import Dispatcher
from manyhands.servers.process.participants import Participants
from manyhands.servers.process.peer_servers import PeerPort
from manyhands.servers.protocol.consistency import OutOfTurn
from manyhands.servers.protocol.messages import (
    Answer,
    Done,
    Hello,
    NotAMessage,
    Refusal,
    Request,
    WorkerBye,
    encode,
    request,
)

_LAST_NUMBER = 1 << 62  # of a message: no message of a server follows its goodbye
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
    """One server and the ports through which other processes reach it.

    Peers come through one of the ports or, where this server has gone to them, through `peer_port`. With `survives`,
    workers may die and others come in their place. The server calls `check` now and then; it may raise.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        ports: Sequence[Port],
        peer_port: PeerPort,
        participants: Participants,
        *,
        digest: int,
        survives: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._ports = [*ports, peer_port]
        self._participants = participants
        self._digest = digest
        self._survives = survives
        self._check = check
        self._expected = set(participants.workers)  # that have not said goodbye
        self._gone: set[int] = set()  # peers that have said goodbye
        self._waiting: list[tuple[int, int]] = []  # workers not let in before all peers, and their greetings
        self._has_left = False
        self._record_at = 0.0
        self._port_of: dict[int, Port] = dict.fromkeys(peer_port.numbers, peer_port)
        self._last = dict.fromkeys(participants.all, 0)  # the number of each one's last message

    def run(self) -> None:
        """Serve until all workers have said goodbye."""
        peers = self._participants.peers
        for peer in peers & self._port_of.keys():
            self._reunite(peer)
        while self._expected:
            self._take_turn()
        for peer in peers:
            self._send(peer, WorkerBye(number=_LAST_NUMBER), None)
        self._has_left = True
        for peer in self._gone:
            self._port_of[peer].forget(peer)
        while self._gone < peers:
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
        """Handle the messages that have come; says whether there were any."""
        heard = False
        for port in self._ports:
            for number, content, payload in self._taken(port):
                heard = True
                try:
                    self._handle(port, number, request(content), payload)
                except (NotAMessage, OutOfTurn) as error:
                    if number in self._participants.local:
                        raise  # only our own code can have sent it
                    telemetry.count("frames_dropped", 1)
                    telemetry.event("dropped", worker=number, reason=str(error))
        return heard

    def _taken(self, port: Port) -> Iterator[tuple[int, bytes, Tensor | None]]:
        """Messages; a worker that is gone ends its generation, and a peer that is gone comes again."""
        try:
            yield from port.take()
        except PeerLost:
            if not self._survives:
                raise
            for peer in port.hang_up():
                self._last[peer] = 0
                self._reunite(peer)

    def _record(self, *, now: bool = False) -> None:
        """Now and then: how stale the gradients of the updates were, as counts."""
        time_s = time.monotonic()
        if (now or time_s >= self._record_at) and (counts := self._dispatcher.unrecorded()):
            telemetry.event("updates", **counts)
            seconds = telemetry.totals()
            told = {name: round(seconds.get(name, 0.0), 4) for name in ("wait_s", "update_s")}
            telemetry.event("serving", **told)
            self._record_at = time_s + _RECORD_PERIOD_S

    def _sleep(self) -> None:
        poll = select.poll()
        for port in self._ports:
            for fd in port.fds():
                poll.register(fd, select.POLLIN)
        with telemetry.timed("wait"):
            poll.poll(_PATIENCE_MS)

    def _handle(self, port: Port, number: int, message: Request, payload: Tensor | None) -> None:
        if isinstance(message, Hello):
            self._prepare_for(number, message)
        if number not in self._last or message.number <= self._last[number]:
            raise NotAMessage(f"number {message.number} after {self._last.get(number)}")
        if isinstance(message, Hello):
            self._welcome(port, number, message)
        elif self._port_of.get(number) is not port:
            raise NotAMessage("the process has not said who it is")
        elif isinstance(message, WorkerBye):
            self._part_from(port, number)
        else:
            vector = self._checked(number, message, payload)
            for to, answer, attached in self._dispatcher.handle(number, message, vector):
                self._send(to, answer, attached)
        self._last[number] = message.number

    def _prepare_for(self, number: int, hello: Hello) -> None:
        if hello.generation > self._participants.generation:
            self._regroup(hello)
        if number in self._participants.peers and self._survives:
            self._last[number] = 0  # a new process has taken its place

    def _regroup(self, hello: Hello) -> None:
        """The first worker of a new generation: the generation before is over."""
        workers, peers = range(hello.workers), self._participants.peers
        self._participants = self._participants.regrouped(workers, hello.generation)
        self._expected = set(workers)
        self._last = {peer: self._last[peer] for peer in peers} | dict.fromkeys(workers, 0)
        self._port_of = {number: port for number, port in self._port_of.items() if number in peers}
        self._waiting.clear()
        self._dispatcher.regroup(workers, hello.generation)

    def _welcome(self, port: Port, number: int, hello: Hello) -> None:
        if hello.worker != number:
            raise NotAMessage(f"worker {number} says that it is worker {hello.worker}")
        self._port_of[number] = port
        peers = self._participants.peers
        if hello.digest != self._digest:
            reason = f"worker {number} has another model or optimizer than the servers; build the same on all"
            port.send(number, encode(Refusal(reason=reason)), None)
        elif number in peers:
            self._reunite(number)
        elif number not in self._participants.backups:
            self._waiting.append((number, hello.number))
        if peers <= self._port_of.keys():
            for worker, said in self._waiting:
                self._send(worker, Done(number=said), None)
            self._waiting.clear()

    def _part_from(self, port: Port, number: int) -> None:
        """A worker or a peer says goodbye."""
        if number in self._expected or self._has_left:
            port.forget(number)  # otherwise a peer still waits for our goodbye
        self._expected.discard(number)
        self._gone.update(self._participants.peers & {number})

    def _reunite(self, peer: int) -> None:
        """A peer is here, perhaps again, or a new process in its place: the server repeats what it may have missed."""
        for to, message, vector in self._dispatcher.reunite(peer):
            self._send(to, message, vector)
        if self._has_left:
            self._send(peer, WorkerBye(number=_LAST_NUMBER), None)

    def _checked(self, number: int, message: Request, payload: Tensor | None) -> Tensor | None:
        """The vector of a message, once the sender and the size are right."""
        if not self._participants.may_send(number, self._dispatcher.sender_of(message)):
            raise NotAMessage(f"process {number} may not send {type(message).__name__}")
        size = self._dispatcher.expects(message)
        if size is None:
            raise NotAMessage("it is about what this server does not own")
        if number in self._participants.local:
            return None
        if size != (0 if payload is None else payload.numel()):
            raise NotAMessage(f"{0 if payload is None else payload.numel()} bytes instead of {size}")
        return None if payload is None else payload.view(self._dispatcher.dtype)

    def _send(self, number: int, answer: Answer | Request, vector: Tensor | None) -> None:
        port = self._port_of.get(number)
        if port:  # else a peer that is not here: it gets the message when it comes
            port.send(number, encode(answer), None if number in self._participants.local else vector)
