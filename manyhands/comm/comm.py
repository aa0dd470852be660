"""What a strategy uses to combine vectors with the other replicas.

`Comm` itself is the world of one: every operation is there and has nothing to do. The other kinds add peers:
through the memory of a host (`shared.py`), between hosts (`between.py`), or by a printable schedule (`scheduled.py`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.errors import UsageError


class Spanned(Protocol):
    """What a replica shows of itself to a comm: gradients as one vector, and the spans this worker owns."""

    @property
    def grads(self) -> Tensor: ...

    def gradient(self, span: Any) -> Tensor: ...

    def stretch(self, first: Any, last: Any) -> Tensor: ...

    @property
    def owned(self) -> Iterable[Any]: ...

    def lane(self, span: Any) -> int: ...

    @property
    def gated(self) -> bool: ...

    @property
    def factored(self) -> Iterable[Any]: ...

    @property
    def errors(self) -> "Errors | None": ...

    def matrices(self, span: Any) -> Sequence[slice]: ...

    def widths(self, span: Any) -> Sequence[int]: ...

    used: Tensor
    steps: int

    def exchange_factors(self) -> Iterable[Any]: ...

    def await_factors(self, *, meet: bool) -> None: ...

    def receive(self) -> None: ...


class Errors(Protocol):
    """What codecs have left out until now."""

    def of(self, span: Any, made: int) -> tuple[Tensor | None, Tensor]: ...


class ServerAccess(Protocol):
    """What a worker sees of the servers: push gradients, pull parameters, wait."""

    def wait(self) -> None:
        """Put in place what has come; return when the parameters are as fresh as the consistency wants them."""

    def begin(self, share: Any) -> Any:
        """The share of a step that is to be pushed; its backward pass waits until the last push was applied."""

    def push(self, span: Any) -> None:
        """Send a span's gradients: for `on_ready` of a backward pass."""

    def finish(self) -> None:
        """All gradients of this step are pushed."""

    def defers(self) -> bool:
        """Whether gradients of some layers wait here for a later push."""

    def go_on(self, rounds: int) -> None:
        """A generation begins; so many steps were made in those before."""

    def made(self, steps: int) -> int:
        """How many steps all servers must have applied for this worker to have made so many in this generation."""

    def flush(self) -> object:
        """Push what was deferred, of layers that are not pushed in every step."""

    def settle(self) -> None:
        """Return when the servers have applied all that this worker has pushed."""

    def pull(self, *, whole: bool = True) -> None:
        """All parameters as the servers have them now; if not `whole`, of tables only the rows that are news, for a
        worker that has not changed its copy itself."""

    def leave(self, take_part: Callable[[Any], object]) -> None:
        """The servers need not wait for this worker until all workers have paused; `take_part(share)` makes a step
        where workers of its host that have data need it."""


class Sums:
    """A sum of gradients over all replicas that is under way; iterating yields owned spans as they are complete."""

    # Where given, spans can be started one by one while the backward pass goes on.
    start: Callable[[Any], None] | None = None

    def __init__(self, comm: "Comm", replica: Spanned) -> None:
        self._comm = comm
        self._replica = replica

    def __iter__(self) -> Iterator[Any]:
        if self._comm.size > 1:  # a parameter that has a gradient on any replica is updated on all
            self._replica.used = self._comm.any_(self._replica.used)
        return self._complete()

    def _complete(self) -> Iterator[Any]:
        if self._comm.size > 1:
            self._comm.sum_(self._replica.grads)
        yield from self._replica.owned


class Comm:
    """Replica `rank` of `size`; vectors are contiguous, the same length everywhere, and changed in place."""

    rank = 0
    size = 1
    servers: ServerAccess | None = None  # where the run has some
    _started: Tensor | None = None  # the sum that may be under way

    def vector(self, length: int, dtype: torch.dtype) -> Tensor:
        """A zero-filled vector that this comm can sum fastest; all must ask, in the same order."""
        return torch.zeros(length, dtype=dtype)

    def keep_values(self, vector: Tensor) -> None:
        """What shows some of a `vector` keeps its values when its memory is returned."""

    def give_back(self, vector: Tensor) -> None:
        """Return the memory of a `vector`, whose contents are lost; all workers must, and none may still use it."""

    def sum_(self, vector: Tensor) -> None:
        """The sum over all replicas, the same bits everywhere."""

    def mean_(self, vector: Tensor) -> None:
        self.sum_(vector)
        if self.size > 1:
            vector.div_(self.size)

    def sum_of(self, value: float) -> float:
        """The sum of one number over all replicas."""
        number = torch.tensor([value], dtype=torch.float64)
        self.sum_(number)
        return float(number)

    def most_of(self, value: float) -> float:
        """The largest of the replicas' numbers."""
        row = torch.zeros(self.size, dtype=torch.float64)
        row[self.rank] = value
        self.sum_(row)
        return float(row.max())

    def gather(self, payload: bytes) -> list[bytes]:
        """The bytes of every worker, by rank."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(payload)
        self.sum_(sizes)
        edges = [0, *sizes.cumsum(0).tolist()]
        everything = torch.zeros(edges[-1], dtype=torch.uint8)
        if payload:
            own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            everything[edges[self.rank] : edges[self.rank + 1]] = own
        self.sum_(everything)
        blob = everything.numpy().tobytes()
        return [blob[begin:end] for begin, end in itertools.pairwise(edges)]

    def swap(self, peer: int, vector: Tensor) -> Tensor:
        """A pair of replicas exchange vectors; returns the other's. All call it equally often: a replica without a
        partner names itself, and gets its own vector."""
        if peer != self.rank:
            raise UsageError(
                "pairs of workers exchange through the memory of a host, or between hosts: use --device cpu"
            )
        return vector.clone()

    def swap_numbers(self, peer: int, values: Sequence[float]) -> list[float]:
        """The same for a few numbers."""
        return [
            float(number) for number in self.swap(peer, torch.tensor(values, dtype=torch.float64)).tolist()
        ]

    def start_swap(self, peer: int, vector: Tensor) -> None:
        """Begin a swap with a replica of another host that may go on while the caller computes; at most one at a time,
        begun by the two whenever each is ready. Until `finish_swap` neither may touch the vector."""
        raise UsageError("pairs of workers exchange between hosts: use --device cpu")

    def swap_is_done(self) -> bool:
        """Whether `finish_swap` would not have to wait."""
        return True

    def finish_swap(self) -> Tensor | None:
        """The other's vector of the swap that was started, if any."""
        return None

    def start_sum(self, vector: Tensor) -> None:
        """Begin a sum that may go on while the caller computes; at most one at a time. Until `finish_sum` no
        process may touch the vector."""
        self.sum_(vector)
        self._started = vector

    def sum_is_done(self) -> bool:
        """Whether `finish_sum` would not have to wait."""
        return True

    def finish_sum(self) -> Tensor | None:
        """Wait for the sum that was started, if any, and return it."""
        started, self._started = self._started, None
        return started

    def local(self, groups: int | None = None) -> "Comm":
        """The workers of this worker's host, or of its group where all workers form `groups`, as a comm of its own."""
        if self.size > 1:
            raise UsageError("groups of workers exchange through the memory of a host: use --device cpu")
        return self

    def sums(self, replica: Spanned) -> Sums:
        """Begin a sum of gradients over all replicas."""
        return Sums(self, replica)

    def copy_(self, vector: Tensor, source: int = 0) -> None:
        """One replica's bits to all: an integer sum in which the others add nothing."""
        whole_numbers = bits(vector)
        if self.rank != source:
            whole_numbers.zero_()
        self.sum_(whole_numbers)

    def any_(self, flags: Tensor) -> Tensor:
        """For each flag, whether any replica has it set."""
        if self.size > 1:
            flags = flags.to(torch.int32)
            self.sum_(flags)
            flags = (flags > 0).to(torch.uint8)
        return flags


def bits(vector: Tensor) -> Tensor:
    """A vector's memory as whole numbers, which add up exactly where all but one worker have zeros.

    Torch sees memory as int32 only if it begins and ends at a multiple of 4 bytes: 3 numbers of 16 bits do not.
    """
    is_even = vector.nbytes % 4 == 0 and vector.storage_offset() * vector.itemsize % 4 == 0
    return vector.view(torch.int32 if is_even else torch.uint8)
