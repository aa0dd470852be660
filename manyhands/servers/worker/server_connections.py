"""A worker's connections with the servers of one group: it numbers what it says, and sorts what they answer."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from manyhands import telemetry
from manyhands.errors import ManyhandsError, PeerLost, UsageError
from manyhands.servers.protocol.messages import (
    Answer,
    Applied,
    Done,
    Finish,
    Hello,
    Norm,
    Pull,
    Push,
    Put,
    Refusal,
    Request,
    Values,
    WorkerBye,
    answer,
    encode,
)
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.transport.connection import Connection

A = TypeVar("A", bound=Answer)
Arrived = tuple[Values, Tensor | None]


class ServerConnections:
    """One connection with each server.

    A server answers a push when it has applied it, at any time. Such answers wait here until the worker looks at them.
    """

    def __init__(self, connections: Sequence[Connection], groups: Sequence[SpanGroup]) -> None:
        self.numbers = itertools.count(1)  # of what this worker says: the servers drop what comes twice
        self.in_flight: set[int] = set()  # spans that are pushed and not yet applied
        self.arrived: list[Arrived] = []  # parameters that came with answers, and are not yet in place
        self.norms: dict[int, float] = {}  # by server: squares, of gathered gradients that are to be clipped
        self.on_norms: Callable[[], None] = (
            self.norms.clear
        )  # called while this worker waits, if there are any
        self._connections = connections
        self._groups = groups
        self._spans = [frozenset(span.index for span in group.spans) for group in groups]
        self._unanswered: set[int] = set()  # groups that are pushed and not yet applied
        self._closed = False

    def greet(self, *, worker: int, digest: int, generation: int, workers: int) -> None:
        """Say hello to all servers; `workers` speak with them in this generation."""
        try:
            for connection in self._connections:
                hello = Hello(
                    number=next(self.numbers),
                    worker=worker,
                    digest=digest,
                    secret=connection.secret,
                    generation=generation,
                    workers=workers,
                )
                connection.send(encode(hello))
            for server in self.servers:
                self.answer_of(server, Done)
        except ManyhandsError:
            self.drop()
            raise

    @property
    def servers(self) -> range:
        return range(len(self._connections))

    # Questions

    def send(self, server: int, message: Request, vector: Tensor | None = None) -> None:
        self._connections[server].send(encode(message), vector)

    def ask(self, question: Callable[[int], Request], kind: type[A]) -> list[A]:
        """The answers of all servers to a question, which is asked with a number."""
        for server in self.servers:
            self.send(server, question(next(self.numbers)))
        return [self.answer_of(server, kind) for server in self.servers]

    def answer_of(self, server: int, kind: type[A]) -> A:
        while True:
            said, vector = self._next(server)
            if isinstance(said, kind):
                return said
            self._note(said, vector)

    def fetch(self, name: str, *, whole: bool = True) -> list[Arrived]:
        """A vector as the servers have it now; of tables only the rows that are news, if not `whole`."""
        for group in self._groups:
            self.send(
                group.server,
                Pull(number=next(self.numbers), group=group.index, vector=name, whole=whole),
            )
        wanted = {group.index for group in self._groups}
        found: list[Arrived] = []
        while wanted:
            said, vector = self._next(self._groups[min(wanted)].server)
            late = isinstance(said, Values) and said.group in self._unanswered  # the answer to a push
            if isinstance(said, Values) and said.vector == name and said.group in wanted and not late:
                wanted.remove(said.group)
                found.append((said, vector))
            else:
                self._note(said, vector)
        return found

    def put(self, name: str, source: Tensor) -> None:
        """Give the servers a vector's values."""
        for group in self._groups:
            message = Put(number=next(self.numbers), group=group.index, vector=name)
            self.send(group.server, message, source[group.slice])
        for group in self._groups:
            self.answer_of(group.server, Done)

    # Pushes, and answers that come by themselves

    def push(self, group: SpanGroup, message: Push, vector: Tensor | None) -> None:
        self.wait_for(group)  # an answer says only which group it is about
        self._unanswered.add(group.index)
        self.in_flight |= self._spans[group.index]
        self._connections[group.server].send(encode(message), vector)
        telemetry.count("pushes", 1)
        self.listen()

    def finish(self, step: int) -> None:
        """Tell all servers that this worker has pushed all of a step."""
        for connection in self._connections:
            connection.send(encode(Finish(number=next(self.numbers), step=step)))

    def listen(self) -> None:
        """Take what has come without waiting."""
        for connection in self._connections:
            while (found := connection.take(wait=False)) is not None:
                self._note(answer(found[0]), found[1])

    def wait_for(self, group: SpanGroup) -> None:
        """Return when the server has applied what this worker has pushed of a group."""
        if group.index in self._unanswered:
            with telemetry.timed("wait"):
                while group.index in self._unanswered:
                    if self.norms:
                        self.on_norms()
                    self.hear(group.server)

    def settle(self) -> None:
        """Return when the servers have applied all that this worker has pushed."""
        for index in sorted(self._unanswered):
            self.wait_for(self._groups[index])

    def owners_in_flight(self) -> list[int]:
        """The servers that have not yet applied all that this worker has pushed."""
        return sorted({self._groups[index].server for index in self._unanswered})

    def hear(self, server: int) -> None:
        """Wait for the next answer of a server."""
        self._note(*self._next(server))

    def _next(self, server: int) -> tuple[Answer, Tensor | None]:
        found = None
        while found is None:
            found = self._connections[server].take(wait=True)
        return answer(found[0]), found[1]

    def _note(self, said: Answer, vector: Tensor | None) -> None:
        if isinstance(said, Applied):
            self._applied(said.group)
        elif isinstance(said, Values):
            self._applied(said.group)
            self.arrived.append((said, vector))
        elif isinstance(said, Norm):
            self.norms[said.server] = said.square
        elif isinstance(said, Refusal):
            raise UsageError(said.reason)

    def _applied(self, group: int) -> None:
        self._unanswered.discard(group)
        self.in_flight -= self._spans[group]

    # The end

    def close(self) -> None:
        """Say goodbye; the servers end when all workers have."""
        if self._closed:
            return
        self._closed = True
        for connection in self._connections:
            with contextlib.suppress(PeerLost):  # nothing is wanted of it any more
                connection.send(encode(WorkerBye(number=next(self.numbers))))
            connection.close()

    def drop(self) -> None:
        """Leave without goodbye: the generation is over, and another one comes."""
        if self._closed:
            return
        self._closed = True
        for connection in self._connections:
            connection.close(linger=False)
