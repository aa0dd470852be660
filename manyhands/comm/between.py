"""Sums between hosts, in lanes.

A lane is a set of workers, one of each host, that exchange the same spans: every local worker drives the network
in parallel with the others. There are as many lanes as the largest host has workers; on a smaller host one
worker serves several, so mixed layouts (3 workers here, 1 there) need nothing special.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.comm import Comm, Spanned, Sums
from manyhands.comm.transports.gloo import Network, waited
from manyhands.errors import PeerLost


def lane_count(hosts: Sequence[Sequence[int]]) -> int:
    return max(len(ranks) for ranks in hosts)


def lane_ranks(hosts: Sequence[Sequence[int]], lane: int) -> list[int]:
    """The workers of a lane, one per host."""
    return [ranks[lane % len(ranks)] for ranks in hosts]


class BetweenHosts(Comm):
    """Host-shared replicas as peers: `rank` of `size` counts hosts."""

    def __init__(
        self, hosts: Sequence[Sequence[int]], rank: int, network: Network, *, devices: Any = None
    ) -> None:
        """With `devices`, a group of all workers that sums on their GPUs."""
        self.size = len(hosts)
        self.rank = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self.lanes = lane_count(hosts)
        self._groups: dict[int, Any] = {}
        self._quick: list[Any] = []  # small messages do not queue behind large ones
        self._under_way: Any = None
        for lane in range(self.lanes):
            ranks = lane_ranks(hosts, lane)
            if rank in ranks:
                name = "devices" if devices else "lane"
                self._groups[lane] = devices or network.group(f"{name}/{lane}", ranks, rank)
                self._quick.append(network.group(f"{name}/{lane}/quick", ranks, rank))

    def mine(self) -> Sequence[int]:
        return tuple(self._groups)

    def sum_lane(self, vector: Tensor, lane: int) -> None:
        self.start_lane(vector, lane)()

    def start_lane(self, vector: Tensor, lane: int) -> Callable[[], None]:
        """Begin a sum; calling what it returns waits for the result."""
        work = self._begin(vector, lane)
        return lambda: _waited(work)

    def _begin(self, vector: Tensor, lane: int) -> Any:
        # Ring all-reduce, which is what the library does for large vectors: this is the traffic it makes.
        sent = 2 * (self.size - 1) * vector.nbytes // self.size
        telemetry.count("bytes_sent", sent)
        telemetry.count("bytes_received", sent)
        return _started(self._groups[lane], vector)

    def sum_(self, vector: Tensor) -> None:
        with telemetry.timed("exchange"):
            self.sum_lane(vector, self.mine()[0])

    def start_sum(self, vector: Tensor) -> None:
        self.finish_sum()
        self._under_way = self._begin(vector, self.mine()[0])
        self._started = vector

    def sum_is_done(self) -> bool:
        return self._under_way is None or self._under_way.is_completed()

    def finish_sum(self) -> Tensor | None:
        if self._under_way:
            with telemetry.timed("exchange"):
                _waited(self._under_way)
            self._under_way = None
        return super().finish_sum()

    def any_(self, flags: Tensor) -> Tensor:
        flags = flags.clone()
        self.start_quick(flags, dist.ReduceOp.MAX)()
        return flags

    def most_of(self, value: float) -> float:
        """May overtake a sum that was started and that not all have joined yet."""
        number = torch.tensor([value], dtype=torch.float64)
        with telemetry.timed("wait"):
            _waited(_started(self._quick[0], number, dist.ReduceOp.MAX))
        return float(number)

    def start_quick(self, vector: Tensor, operation: Any = dist.ReduceOp.SUM) -> Callable[[], None]:
        """A sum of a few numbers that overtakes whatever the lanes are busy with."""
        # A worker that serves several lanes answers in each: its peers there hear of its host in no other way.
        copies = [vector, *(vector.clone() for _ in self._quick[1:])]
        sent = vector.nbytes * len(copies)
        telemetry.count("bytes_sent", sent)
        telemetry.count("bytes_received", sent)
        works = [_started(group, copy, operation) for copy, group in zip(copies, self._quick, strict=True)]

        def wait() -> None:
            with telemetry.timed("wait"):
                for work in works:
                    _waited(work)

        return wait

    def sums(self, replica: Spanned) -> Sums:
        return SpanSums(
            self, replica, lambda span: self.start_lane(replica.gradient(span), replica.lane(span))
        )


Begin = Callable[[Any], Callable[[], None]]


class SpanSums(Sums):
    """Each span leaves as soon as its host has it; results are taken in the order in which they left, or, where the
    replica is gated, when all have come."""

    def __init__(self, comm: Comm, replica: Spanned, begin: Begin) -> None:
        """`begin` starts the sum of a span; calling what it returns waits for the result."""
        super().__init__(comm, replica)
        self._begin = begin
        self._under_way: list[tuple[Any, Callable[[], None]]] = []
        self.start = self._start

    def _start(self, span: Any) -> None:
        self._under_way.append((span, self._begin(span)))

    def _complete(self) -> Iterator[Any]:
        gated = self._replica.gated
        for span in self._replica.exchange_factors():
            self._start(span)
        for span, wait in self._under_way:
            with telemetry.timed("exchange"):
                wait()
            if not gated:
                yield span
        self._replica.await_factors(meet=not gated)
        if gated:
            self._replica.receive()
            yield from (span for span, _ in self._under_way)
        yield from self._replica.factored


def _started(group: Any, vector: Tensor, operation: Any = dist.ReduceOp.SUM) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    with _losing():
        return group.allreduce([vector], options)


def _waited(work: Any) -> None:
    with _losing():
        waited(work)


@contextmanager
def _losing() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the connection to another host is gone ({str(error).splitlines()[0]})") from error
