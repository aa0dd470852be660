"""Sums by a printable schedule over point-to-point messages: ring, tree and the like."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.comm.collectives.executor import all_reduce, all_reduce_each, stripe_bytes
from manyhands.comm.collectives.schedule import Hosts, Schedule
from manyhands.comm.comm import Comm, Spanned, Sums
from manyhands.comm.pairs import swap
from manyhands.comm.transports.transport import Transport


class ScheduledComm(Comm):
    """Every worker a replica of its own, summing the way the named topology says."""

    def __init__(
        self, transport: Transport, topology: str, hosts: Hosts, control: Comm, *, overlaps: bool
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.transport = transport
        self.schedule = TOPOLOGIES[topology](self.size, hosts)
        self._control = control  # flags are not part of the published traffic
        # Over a network somebody else moves the bytes; in a host's memory it would take the cores from computing.
        self._overlaps = overlaps

    def sum_(self, vector: Tensor) -> None:
        with telemetry.timed("exchange"):
            all_reduce(self.schedule, self.transport, vector)

    def sums(self, replica: Spanned) -> Sums:
        return _Streamed(self, replica) if self._overlaps else Sums(self, replica)

    def swap(self, peer: int, vector: Tensor) -> Tensor:
        return swap(self.transport, peer, vector)

    def any_(self, flags: Tensor) -> Tensor:
        return self._control.any_(flags)


class _Streamed(Sums):
    """Stripes of adjacent spans leave as soon as they are complete, and are summed by a thread meanwhile."""

    def __init__(self, comm: ScheduledComm, replica: Spanned) -> None:
        super().__init__(comm, replica)
        self._schedule, self._transport = comm.schedule, comm.transport
        self._stripe_bytes = stripe_bytes(comm.schedule)
        self._collected: list[Any] = []
        self._stripes: list[list[Any]] = []
        self._thread: _Thread | None = None
        self.start = self._start

    def _start(self, span: Any) -> None:
        self._collected.append(span)
        if self._vector().nbytes >= self._stripe_bytes:
            self._thread = self._thread or _Thread(self._schedule, self._transport)
            self._thread.given.put(self._send_off())

    def _vector(self) -> Tensor:
        return self._replica.stretch(self._collected[0], self._collected[-1])

    def _send_off(self) -> Tensor:
        vector = self._vector()
        self._stripes.append(self._collected)
        self._collected = []
        return vector

    def __iter__(self) -> Iterator[Any]:
        rest = self._send_off() if self._collected else None
        if self._thread:
            if rest is not None:
                self._thread.given.put(rest)
            done = self._thread.results()
        else:
            done = all_reduce_each(self._schedule, self._transport, [] if rest is None else [rest])
        for spans in self._stripes:
            with telemetry.timed("exchange"):
                next(done)
            yield from spans


class _Thread:
    """Sums what it is given, in that order, until it is told that this was all."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self.given: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Tensor | Exception] = queue.SimpleQueue()
        # A daemon: whoever fails meanwhile must be able to end although the others never answer.
        threading.Thread(target=self._run, args=(schedule, transport), name="sums", daemon=True).start()

    def _run(self, schedule: Schedule, transport: Transport) -> None:
        try:
            for vector in all_reduce_each(schedule, transport, iter(self.given.get, None)):
                self._done.put(vector)
        except Exception as error:
            self._done.put(error)

    def results(self) -> Iterator[Tensor]:
        """That was all: each vector when it is complete."""
        self.given.put(None)
        while True:
            result = self._done.get()
            if isinstance(result, Exception):
                raise result
            yield result
