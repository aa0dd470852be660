"""Work for an optimizer that runs on a worker and whose vectors are on the servers (L-BFGS of Sandblaster).

Dean et al. 2012, section 4.2: workers take portions of a batch as they become free and add their gradients here; the
coordinating worker has the servers combine and measure vectors, of which each server has a part.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from manyhands.servers.process.group_update import GradientReader
from manyhands.servers.process.handlers import Handler, Handlers, Reply
from manyhands.servers.process.vectors import Vectors
from manyhands.servers.protocol.messages import (
    BEFORE,
    GRADIENT,
    Add,
    Combine,
    Done,
    Measure,
    Number,
    Offer,
    Portion,
    Take,
)


class Evaluation:
    """One server's part of it; `end_step` is called when the coordinating worker has ended a step."""

    def __init__(
        self,
        vectors: Vectors,
        reader: GradientReader,
        group_bytes: Callable[[int], int | None],
        end_step: Callable[[], None],
    ) -> None:
        self._vectors = vectors
        self._reader = reader
        self._end_step = end_step
        self._portions = iter(range(0))
        self.handlers: Handlers = {
            Offer: Handler(self._offer),
            Take: Handler(self._take),
            Add: Handler(self._add, lambda message: group_bytes(message.group)),
            Combine: Handler(self._combine),
            Measure: Handler(self._measure),
        }

    def begin_anew(self, *, takes_back: bool) -> None:
        """Workers of a new generation begin; with `takes_back` the parameters become those before the step."""
        self._vectors.begin_anew(takes_back=takes_back)

    def _offer(self, worker: int, message: Offer, payload: Tensor | None) -> Iterator[Reply]:
        self._portions = iter(range(message.portions))
        self._vectors.combine(GRADIENT, [])
        if not message.portions:
            self._vectors.forget([BEFORE])
            self._end_step()
        yield worker, Done(number=message.number), None

    def _take(self, worker: int, message: Take, payload: Tensor | None) -> Iterator[Reply]:
        yield worker, Portion(index=next(self._portions, None)), None

    def _add(self, worker: int, message: Add, payload: Tensor | None) -> Iterator[Reply]:
        self._vectors.add(message.group, self._reader.vector(worker, message.group, payload))
        yield worker, Done(number=message.number), None

    def _combine(self, worker: int, message: Combine, payload: Tensor | None) -> Iterator[Reply]:
        self._vectors.forget(message.forgotten)
        self._vectors.combine(message.vector, message.terms)
        yield from ()

    def _measure(self, worker: int, message: Measure, payload: Tensor | None) -> Iterator[Reply]:
        yield worker, Number(value=self._vectors.measure(message.kind, message.one, message.other)), None
