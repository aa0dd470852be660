"""An evaluation of the loss that the workers divide among them, for an optimizer that only one of them runs."""

from collections.abc import Callable, Sequence

from manyhands import telemetry
from manyhands.replica.replica import Replica
from manyhands.servers.protocol.messages import (
    BEFORE,
    PARAMS,
    Add,
    AskStatus,
    Combine,
    Done,
    Measure,
    Number,
    Offer,
    Portion,
    Status,
    Take,
)
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.worker.minimizer import Minimizer, Terms
from manyhands.servers.worker.server_connections import ServerConnections


class SharedEvaluation:
    """Workers take portions of the samples, and add their gradients on the servers."""

    def __init__(
        self,
        connections: ServerConnections,
        groups: Sequence[SpanGroup],
        replica: Replica,
        clip_norm: float | None,
    ) -> None:
        self._connections = connections
        self._groups = groups
        self._replica = replica
        self._clip_norm = clip_norm
        self._minimizer: Minimizer | None = None

    def minimize(self, gradient: Callable[[], float]) -> float:
        """One step of the user's L-BFGS; `gradient` has all workers evaluate the loss where the parameters are now."""
        self._minimizer = self._minimizer or Minimizer(self._replica.optimizer, self, self._clip_norm)
        self.combine(BEFORE, [(PARAMS, 1.0)], [])
        return self._minimizer.minimize(gradient)

    def begin(self, portions: int) -> None:
        """Begin an evaluation of so many portions, or end the step with none; all that was asked before is done."""
        ask = self._connections.ask
        if not portions:  # no server may have the step if one of them has not changed its parameters yet
            ask(lambda number: AskStatus(number=number), Status)
        ask(lambda number: Offer(number=number, portions=portions), Done)

    def next_portion(self) -> int | None:
        """The next portion; None when there is none left."""
        self._connections.send(0, Take(number=next(self._connections.numbers)))
        return self._connections.answer_of(0, Portion).index

    def add_gradient(self) -> None:
        """Add this worker's gradient to that of the evaluation; returns when it is there."""
        grads = self._replica.grads
        for group in self._groups:
            message = Add(number=next(self._connections.numbers), group=group.index)
            self._connections.send(group.server, message, grads[group.slice])
            telemetry.count("pushes", 1)
        for group in self._groups:
            self._connections.answer_of(group.server, Done)

    def combine(self, vector: str, terms: Terms, forgotten: list[str]) -> None:
        """A vector on the servers becomes a sum of multiples of vectors."""
        for server in self._connections.servers:
            number = next(self._connections.numbers)
            message = Combine(number=number, vector=vector, terms=terms, forgotten=forgotten)
            self._connections.send(server, message)

    def measure(self, kind: str, one: str, other: str) -> list[float]:
        """A number of two vectors, from every server."""
        found = self._connections.ask(
            lambda number: Measure(number=number, kind=kind, one=one, other=other), Number
        )
        return [one.value for one in found]
