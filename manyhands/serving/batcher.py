"""Batches out of requests: what queued while the models computed goes next, without any waiting for more.

Counts samples, not requests. Each servable has a bounded queue, and the one that has had least of the processors' time
goes first. A large request is cut, and other requests go between its pieces. Knows no clock, no socket and no tensor.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from manyhands.errors import ManyhandsError

MOST_ATTEMPTS = 2
"""Of a request whose batch failed or whose process died: the second one alone, so that it can harm no other."""

_FORGET = 0.1  # how fast the estimate of a sample's seconds follows


class QueueFull(ManyhandsError):
    """More samples wait than may; the sender can try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(ManyhandsError):
    """The request was not answered in time."""


class ModelError(ManyhandsError):
    """The model could not answer."""


Answer = memoryview | ManyhandsError


@dataclass(eq=False, kw_only=True)
class QueuedRequest:
    """The samples of one request for one servable."""

    handle: int  # of the servable
    rows: int
    row_shape: tuple[int, ...]
    content: memoryview
    deadline_s: float
    answer: Callable[[Answer], None]
    is_over: bool = False  # answered, or the client has gone
    attempts: int = 0
    waiting: deque[range] = field(init=False)  # the rows that no process has
    _pieces: dict[int, memoryview] = field(default_factory=dict)  # of outputs, by the first row
    _answered: int = 0

    def __post_init__(self) -> None:
        self.waiting = deque([range(self.rows)])

    @property
    def row_bytes(self) -> int:
        return len(self.content) // self.rows

    def complete(self, rows: range, outputs: memoryview) -> None:
        """The outputs of some of its rows are there."""
        self._pieces[rows.start] = outputs
        self._answered += len(rows)
        if self._answered == self.rows and not self.is_over:
            self.is_over = True
            pieces = [self._pieces[start] for start in sorted(self._pieces)]
            self.answer(pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))

    def refuse(self, error: ManyhandsError) -> None:
        if not self.is_over:
            self.is_over = True
            self.answer(error)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of several requests that go through the model together, as so many rows as `size` says."""

    handle: int
    row_shape: tuple[int, ...]
    parts: Sequence[tuple[QueuedRequest, range]]
    size: int

    @property
    def rows(self) -> int:
        return sum(len(rows) for _, rows in self.parts)

    def contents(self) -> list[bytes | memoryview]:
        """The bytes of all rows, where they lie; zeros fill the batch up to its size."""
        found: list[bytes | memoryview] = [
            work.content[rows.start * work.row_bytes : rows.stop * work.row_bytes]
            for work, rows in self.parts
        ]
        if missing := self.size - self.rows:
            found.append(bytes(missing * self.parts[0][0].row_bytes))
        return found

    def complete(self, outputs: memoryview) -> None:
        row_bytes, place = len(outputs) // self.size, 0
        for work, rows in self.parts:
            end = place + len(rows) * row_bytes
            work.complete(rows, outputs[place:end])
            place = end


@dataclass
class _WorkQueue:
    """What waits for one servable."""

    works: deque[QueuedRequest] = field(default_factory=deque)
    rows: int = 0  # of those that wait
    spent_s: float = 0.0  # of processes, counted from where the others were when it began
    row_s: float = 0.0

    def drop_over(self) -> None:
        """Leave the first request that still wants an answer in front."""
        while self.works and self.works[0].is_over:
            self.rows -= sum(map(len, self.works.popleft().waiting))


class Batcher:
    """The queues of all servables. Batches have at most `most_rows`, or one of `sizes`, where those are given."""

    def __init__(self, most_rows: int = 64, most_waiting_rows: int = 4096, sizes: Sequence[int] = ()) -> None:
        self.sizes = sorted(sizes)
        self.most_rows = self.sizes[-1] if sizes else most_rows
        self.most_waiting_rows = most_waiting_rows
        self._queues: dict[int, _WorkQueue] = {}
        # Also those that are with a process; what has been answered since `expire` was last called is among them.
        self._unanswered: set[QueuedRequest] = set()

    def open(self, handle: int) -> None:
        self._queues[handle] = _WorkQueue(spent_s=self._least_spent_s())

    def close(self, handle: int) -> None:
        """For a servable that goes; what still waits for it is refused."""
        for work in self._queues.pop(handle).works:
            work.refuse(ModelError("this version was unloaded before it could answer; ask again"))

    def add(self, work: QueuedRequest) -> None:
        """Queue a request, or refuse it at once."""
        queue = self._queues[work.handle]
        queue.drop_over()
        if queue.rows and queue.rows + work.rows > self.most_waiting_rows:
            raise QueueFull(
                f"{queue.rows:,} samples wait already, and at most {self.most_waiting_rows:,} may; try again later",
                retry_after_s=queue.rows * queue.row_s,
            )
        if not queue.works:  # a servable that was idle has no claim on the time that it did not use
            queue.spent_s = max(queue.spent_s, self._least_spent_s())
        queue.works.append(work)
        queue.rows += work.rows
        self._unanswered.add(work)

    def waiting_rows(self, handle: int) -> int:
        return self._queues[handle].rows if handle in self._queues else 0

    def take(self, among: Container[int] | None = None) -> Batch | None:
        """The next batch, from the servable (of those given) that has had least; None if nothing waits."""
        for queue in self._queues.values():
            queue.drop_over()
        busy = [
            (queue.spent_s, handle)
            for handle, queue in self._queues.items()
            if queue.works and (among is None or handle in among)
        ]
        return self._cut(min(busy)[1]) if busy else None

    def expire(self, now_s: float) -> None:
        """Refuse what has waited too long, also for a process; to be called several times a second."""
        for work in [one for one in self._unanswered if one.deadline_s <= now_s]:
            work.refuse(DeadlinePassed("the time for this request passed while it waited"))
        self._unanswered = {one for one in self._unanswered if not one.is_over}

    def finished(self, batch: Batch, took_s: float) -> None:
        """Charge a servable for what its batch took."""
        queue = self._queues.get(batch.handle)
        if queue is not None:
            queue.spent_s += took_s
            row_s = took_s / batch.rows
            queue.row_s = queue.row_s + _FORGET * (row_s - queue.row_s) if queue.row_s else row_s

    def again(self, batch: Batch, error: ManyhandsError, *, was_begun: bool = True) -> None:
        """The batch came to nothing: each of its requests goes first, alone, unless it has had its last attempt. One
        that was not begun is not to blame, and has had none."""
        queue = self._queues.get(batch.handle)
        for work, rows in reversed(batch.parts):
            if work.is_over:
                continue
            work.attempts += was_begun
            if work.attempts >= MOST_ATTEMPTS or queue is None:
                work.refuse(error)
                continue
            if not work.waiting:
                queue.works.appendleft(work)
            work.waiting.appendleft(rows)
            queue.rows += len(rows)

    def _cut(self, handle: int) -> Batch:
        queue = self._queues[handle]
        first = queue.works[0]
        parts: list[tuple[QueuedRequest, range]] = []
        room, unfinished = self.most_rows, []
        while queue.works and room:
            work = queue.works[0]
            if work.is_over:
                queue.drop_over()
                continue
            if parts and (work.row_shape != first.row_shape or work.attempts or first.attempts):
                break  # one that has seen a batch fail goes alone
            queue.works.popleft()
            waiting = work.waiting.popleft()
            rows, rest = waiting[:room], waiting[room:]
            parts.append((work, rows))
            queue.rows -= len(rows)
            room -= len(rows)
            if rest:
                work.waiting.appendleft(rest)
            if work.waiting:
                unfinished.append(work)
        queue.works.extend(unfinished)
        total = self.most_rows - room
        size = next((size for size in self.sizes if size >= total), total)
        return Batch(handle=handle, row_shape=first.row_shape, parts=parts, size=size)

    def _least_spent_s(self) -> float:
        return min((queue.spent_s for queue in self._queues.values() if queue.works), default=0.0)
