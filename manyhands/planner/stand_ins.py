"""A replica, a comm and servers that compute nothing and note what a strategy asks of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from manyhands.planner.flat_vector import ITEM_BYTES, FlatVector
from manyhands.planner.operations import (
    Average,
    Await,
    Fresh,
    Meet,
    Operation,
    Pass,
    PullAll,
    Pushed,
    PushSpan,
    Scope,
    Settle,
    Start,
    Sum,
    Swap,
    Touch,
    Update,
)
from manyhands.planner.roles import Role, SpanFacts
from manyhands.strategies import Traits

EVALUATIONS = 20
"""How often an optimizer that searches a line evaluates the loss in a step: L-BFGS's default is at most so many."""

FORWARD = 1 / 3


class Tape:
    """The operations of the step that is being recorded."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._touched = 0.0
        self._started = 0
        self._inside: list[tuple[float, Start | PushSpan]] | None = None
        self.at = 0.0  # of the pass

    def begin(self) -> None:
        self._operations, self._touched = [], 0.0
        self._started = 0

    def note(self, operation: Operation) -> None:
        if self._inside is not None and isinstance(operation, Start | PushSpan):
            self._inside.append((self.at, operation))
            return
        self._flush()
        last = self._operations[-1] if self._operations else None
        if isinstance(operation, Update) and isinstance(last, Update):
            self._operations[-1] = Update(last.updated_bytes + operation.updated_bytes)
        else:
            self._operations.append(operation)

    def touch(self, touched_bytes: float) -> None:
        self._touched += touched_bytes

    def number(self) -> int:
        self._started += 1
        return self._started

    @contextlib.contextmanager
    def passing(self, share: float) -> Iterator[None]:
        self._inside = []
        yield
        inside, self._inside = self._inside, None
        self.note(Pass(tuple(inside), share))

    def taken(self) -> list[Operation]:
        self._flush()
        return self._operations

    def _flush(self) -> None:
        if self._touched > 4096:  # flags and single numbers take no time
            self._operations.append(Touch(self._touched))
        self._touched = 0.0


class RecordedSpan:
    """A span as a strategy may look at it."""

    def __init__(self, index: int, start: int, length: int) -> None:
        self.index, self.start, self.stop = index, start, start + length
        self.slice = slice(start, start + length)
        self.nbytes = length * ITEM_BYTES


class RecordedReplica:
    """This worker's replica, or the one that it shares."""

    needs_closure = False
    leads = True
    eval_batch: Any = None

    def __init__(self, tape: Tape, role: Role, spans: SpanFacts, traits: Traits) -> None:
        self._tape, self._role, self._facts = tape, role, spans
        self.steps = 0
        lengths = [int(size / ITEM_BYTES) for size in spans.sizes]
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        self.spans = [RecordedSpan(*each) for each in zip(range(len(lengths)), starts, lengths, strict=True)]
        self.params = FlatVector(tape.touch, sum(lengths))
        self.used = FlatVector(tape.touch, len(lengths))
        self.settings: list[float] = [0.0]
        self.part = SimpleNamespace(spread=False)
        self.updates = SimpleNamespace(vectors={})
        self.neighbours = RecordedNeighbours(tape, role, self.params.nbytes)
        self.kept: Any = SimpleNamespace()
        divides = role.shares_replica and traits.lockstep
        # Owners share the spans of a common replica; where they do not step together each worker updates all.
        self.owned = (
            self.spans[:: role.neighbours if divides and traits.servers is None else 1] or self.spans[:1]
        )
        self._owns = 1 / role.neighbours if divides else 1.0
        self._gates = divides and role.neighbours > 1

    @property
    def grads(self) -> FlatVector:
        return FlatVector(self._tape.touch, len(self.params))

    def backward(self, share: Any, on_ready: Callable[[Any], None] | None = None) -> float:
        self.steps += 1
        samples = sum(count for _, count in share.parts) if share.parts is not None else share.samples
        with self._tape.passing(samples / self._role.samples):
            for span, ready in zip(self.spans, self._facts.ready, strict=True):
                self._tape.at = ready
                if on_ready is not None and span in self.owned:
                    on_ready(span)
        if self._gates:
            self._tape.note(Meet("host"))
        return 1.0

    def apply(self, span: Any = None) -> None:
        if span is None:
            self._tape.note(Update(self.params.nbytes * self._owns))
        else:
            self._tape.note(Update(span.nbytes * self._owns * len(self.spans) / len(self.owned)))

    def keep(self, make: Callable[[], Any]) -> Any:
        if isinstance(self.kept, SimpleNamespace):
            self.kept = make()
        return self.kept

    def minimize(self, gradients: Callable[[], float]) -> float:
        for _ in range(EVALUATIONS):
            gradients()
        return 1.0

    def descend(self) -> None:
        self._tape.touch(3 * self.params.nbytes)

    def score(self) -> float:
        with self._tape.passing(FORWARD):
            pass
        return 1.0

    def to_flat(self) -> FlatVector:
        return self.params.clone()

    def load_flat(self, flat: Any) -> None:
        self.params.copy_(flat)

    def forget(self) -> None:
        self._tape.touch(2 * self.params.nbytes)

    def rate(self, factor: float) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class RecordedNeighbours:
    """The open replicas of a host."""

    def __init__(self, tape: Tape, role: Role, vector_bytes: float) -> None:
        self.size, self.index = role.neighbours, 0
        self.ranks = range(role.neighbours)
        self._tape, self._bytes = tape, vector_bytes

    def average_with(self, index: int) -> None:
        self._tape.note(Average(self._bytes))

    def held_off(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class RecordedComm:
    """The other replicas."""

    rank = 0

    def __init__(
        self, tape: Tape, role: Role, *, streams: bool, scope: Scope = "replicas", size: int | None = None
    ) -> None:
        self.size = role.peers if size is None else size
        self._tape, self._role, self._scope, self._streams = tape, role, scope, streams
        self._sum: int | None = None
        self._swap: int | None = None
        self._seen: set[int | None] = set()
        self._vector: FlatVector | None = None

    def sum_(self, vector: Any) -> None:
        if self.size > 1:
            self._tape.note(Sum(vector.nbytes, self._scope))

    def mean_(self, vector: Any) -> None:
        self.sum_(vector)
        if self.size > 1:
            vector.div_(self.size)

    def copy_(self, vector: Any, source: int = 0) -> None:
        self.sum_(vector)

    def sum_of(self, value: float) -> float:
        self._numbers()
        return value

    def most_of(self, value: float) -> float:
        self._numbers()
        return value

    def any_(self, flags: Any) -> Any:
        return flags  # leaves with the handshake or overtakes what is under way: no wait of its own

    def _numbers(self) -> None:
        if self.size > 1:
            self._tape.note(Sum(8.0, self._scope))

    def sums(self, replica: RecordedReplica) -> "RecordedSums":
        return RecordedSums(self._tape, self, replica, starts=self._role.shares_replica or self._streams)

    def swap(self, peer: int, vector: Any) -> Any:
        if self.size > 1:
            self._tape.note(Swap(vector.nbytes))
        return FlatVector(self._tape.touch, len(vector))

    def swap_numbers(self, peer: int, values: Sequence[float]) -> list[float]:
        if self.size > 1:
            self._tape.note(Swap(8.0 * len(values)))
        return list(values)

    def start_sum(self, vector: Any) -> None:
        self.finish_sum()
        self._vector = vector
        if self.size > 1:
            self._sum = self._tape.number()
            self._tape.note(Start(self._sum, vector.nbytes))

    def sum_is_done(self) -> bool:
        self._seen.add(self._sum)
        return True

    def finish_sum(self) -> Any:
        found, self._vector = self._vector, None
        self._finish(self._sum)
        self._sum = None
        return found

    def start_swap(self, peer: int, vector: Any) -> None:
        self.finish_swap()
        self._vector = vector
        if self.size > 1:
            self._swap = self._tape.number()
            self._tape.note(Start(self._swap, vector.nbytes, is_swap=True))

    def swap_is_done(self) -> bool:
        self._seen.add(self._swap)
        return True

    def finish_swap(self) -> Any:
        found, self._vector = self._vector, None
        self._finish(self._swap)
        self._swap = None
        return found

    def _finish(self, number: int | None) -> None:
        if number is not None:
            self._tape.note(Await(number, seen=number in self._seen))
            self._seen.discard(number)

    def local(self, groups: int | None = None) -> "RecordedComm":
        size = self._role.neighbours if groups is None else -(-self._role.workers // groups)
        size = min(size, self._role.neighbours)
        return RecordedComm(
            self._tape, self._role, streams=False, scope="host" if groups is None else "group", size=size
        )


class RecordedSums:
    """A sum of gradients span by span, or of all of them at once where nothing leaves early."""

    def __init__(self, tape: Tape, comm: RecordedComm, replica: RecordedReplica, *, starts: bool) -> None:
        self._tape, self._comm, self._replica = tape, comm, replica
        self._under_way: list[int] = []
        self.start = self._start if starts and comm.size > 1 else None

    def _start(self, span: RecordedSpan) -> None:
        number = self._tape.number()
        # A host's owners send their spans at the same time, over the same link.
        count = len(self._replica.spans) / len(self._replica.owned)
        self._tape.note(Start(number, span.nbytes * count))
        self._under_way.append(number)

    def __iter__(self) -> Iterator[Any]:
        if self._comm.size > 1 and not self._under_way:
            self._comm.sum_(self._replica.grads)
        for number in self._under_way:
            self._tape.note(Await(number))
        return iter(self._replica.owned)


class RecordedServers:
    """The servers that own the parameters."""

    def __init__(
        self, tape: Tape, role: Role, spans: SpanFacts, comm: RecordedComm, replica: RecordedReplica
    ) -> None:
        self.comm = comm
        self._tape, self._role, self._replica, self._bytes = tape, role, replica, spans.bytes
        self._portions = 0

    def wait(self) -> None:
        self._tape.note(Fresh())

    def begin(self, share: Any) -> Any:
        return share

    def push(self, span: RecordedSpan) -> None:
        self._tape.note(PushSpan(float(span.nbytes)))

    def push_gradient(self, gradient: Any, used: Any) -> None:
        self.settle()
        self._tape.note(PushSpan(float(gradient.nbytes)))
        self.finish()

    def finish(self) -> None:
        self._tape.note(Pushed())

    def settle(self) -> None:
        self._tape.note(Settle())

    def pull(self, *, whole: bool = True) -> None:
        self._tape.note(PullAll(self._bytes))

    def agree(self) -> None:
        self.settle()
        self.pull()

    def portions(self, share: Any, samples: int) -> list[tuple[Any, int]]:
        self._portions = max(1, -(-int(share.total()) // samples))
        return [(None, samples)] * self._portions

    def minimize(self, gradient: Callable[[], float]) -> float:
        return self._replica.minimize(gradient)

    def begin_evaluation(self, portions: int) -> None:
        self._left = -(-portions // self._role.workers)

    def next_portion(self) -> int | None:
        self._left -= 1
        return 0 if self._left >= 0 else None

    def add_gradient(self) -> None:
        self._tape.note(PushSpan(self._bytes))
        self._tape.note(Settle())
