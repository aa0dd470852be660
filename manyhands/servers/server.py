"""The loop of a server process: hear, check, hand to the shard, answer; until every worker has said goodbye."""

import select
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from manyhands import telemetry
from manyhands.errors import PeerLost
from manyhands.servers.consistency import OutOfTurn
from manyhands.servers.messages import (
    Answer,
    Bye,
    Done,
    Hello,
    NotAMessage,
    Refusal,
    Request,
    encode,
    request,
)
from manyhands.servers.shard import Shard

_PATIENCE_MS = 1000
_RECORD_PERIOD_S = 0.5


class Port(Protocol):
    """Where messages come in and answers go out."""

    def fds(self) -> Iterator[int]: ...

    def take(self) -> Iterator[tuple[int, bytes, Tensor | None]]: ...

    def send(self, worker: int, content: bytes, vector: Tensor | None) -> None: ...

    def forget(self, worker: int) -> None: ...

    def hang_up(self) -> None: ...

    def close(self) -> None: ...


class Server:
    """One server: its shard, and the ports through which the workers reach it."""

    def __init__(
        self,
        shard: Shard,
        ports: Sequence[Port],
        *,
        near: set[int],
        workers: Iterable[int],
        digest: int,
        survives: bool = False,
    ) -> None:
        self._survives = survives  # whether workers may die, and others come in their place
        self._generation = 0
        self._shard = shard
        self._ports = ports
        self._near = near
        self._digest = digest
        self._expected = set(workers)
        self._record_at = 0.0
        self._port_of: dict[int, Port] = {}
        self._last = dict.fromkeys(self._expected, 0)  # the number of each worker's last message

    def run(self) -> None:
        """Serve until all workers have said goodbye."""
        while self._expected:
            if not self._listen():
                self._sleep()
            self._record()
        self._record(now=True)

    def close(self) -> None:
        for port in self._ports:
            port.close()

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
        """What has come; a worker that is gone ends its generation."""
        try:
            yield from port.take()
        except PeerLost:
            if not self._survives:
                raise
            port.hang_up()

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
        if worker not in self._last or message.number <= self._last[worker]:
            raise NotAMessage(f"number {message.number} after {self._last.get(worker)}")
        if isinstance(message, Hello):
            self._welcome(port, worker, message)
        elif self._port_of.get(worker) is not port:
            raise NotAMessage("it has not said who it is")
        elif isinstance(message, Bye):
            self._expected.discard(worker)
            port.forget(worker)
        else:
            vector = self._checked(worker, message, payload)
            for to, answer, attached in self._shard.handle(worker, message, vector):
                self._send(to, answer, attached)
        self._last[worker] = message.number

    def _regroup(self, hello: Hello) -> None:
        """The first worker of a new generation: those before are over."""
        self._generation = hello.generation
        workers = range(hello.workers)
        self._expected, self._near = set(workers), set(workers)
        self._last = dict.fromkeys(workers, 0)
        self._port_of.clear()
        self._shard.regroup(workers, hello.generation)

    def _welcome(self, port: Port, worker: int, hello: Hello) -> None:
        if hello.worker != worker:
            raise NotAMessage(f"worker {worker} says that it is worker {hello.worker}")
        self._port_of[worker] = port
        if hello.digest == self._digest:
            port.send(worker, encode(Done(number=hello.number)), None)
        else:
            reason = f"worker {worker} has another model or optimizer than the servers; build the same on all"
            port.send(worker, encode(Refusal(reason=reason)), None)

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

    def _send(self, worker: int, answer: Answer, vector: Tensor | None) -> None:
        self._port_of[worker].send(worker, encode(answer), None if worker in self._near else vector)
