"""Sums by a printable schedule over point-to-point messages: ring, tree and the like."""

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.comm.collectives.executor import all_reduce
from manyhands.comm.collectives.schedule import Hosts, Schedule
from manyhands.comm.comm import Comm, Spanned, Sums
from manyhands.comm.pairs import swap
from manyhands.comm.transports.transport import Transport

# To be summed by themselves: what leaves early fills the network, other channels the gaps.
ENOUGH_BYTES = 1 << 20


class ScheduledComm(Comm):
    """Every worker a replica of its own, summing the way the named topology says.

    With several channels, transports that know nothing of each other, sums go on during the backward pass, one in each:
    what one of them leaves idle of the network, the others use.
    """

    def __init__(self, channels: Sequence[Transport], topology: str, hosts: Hosts, control: Comm) -> None:
        self.rank = channels[0].rank
        self.size = channels[0].size
        self.channels = channels
        self.schedule = TOPOLOGIES[topology](self.size, hosts)
        self._control = control  # flags are not part of the published traffic

    def sum_(self, vector: Tensor) -> None:
        with telemetry.timed("exchange"):
            all_reduce(self.schedule, self.channels[0], vector)

    def sums(self, replica: Spanned) -> Sums:
        return _Streamed(self, replica) if len(self.channels) > 1 else Sums(self, replica)

    def swap(self, peer: int, vector: Tensor) -> Tensor:
        with telemetry.timed("exchange"):
            return swap(self.channels[0], peer, vector)

    def any_(self, flags: Tensor) -> Tensor:
        return self._control.any_(flags)


class _Streamed(Sums):
    """Adjacent spans leave together as soon as they are complete and enough; each channel sums some of them."""

    def __init__(self, comm: ScheduledComm, replica: Spanned) -> None:
        super().__init__(comm, replica)
        self._schedule, self._channels = comm.schedule, comm.channels
        self._collected: list[Any] = []
        self._sent: list[list[Any]] = []
        self._threads: list[_Thread] = []
        self.start = self._start

    def _start(self, span: Any) -> None:
        self._collected.append(span)
        if self._vector().nbytes >= ENOUGH_BYTES:
            self._send_off()

    def _vector(self) -> Tensor:
        return self._replica.stretch(self._collected[0], self._collected[-1])

    def _send_off(self) -> None:
        number = len(self._sent) % len(self._channels)
        if number == len(self._threads):
            self._threads.append(_Thread(self._schedule, self._channels[number]))
        self._threads[number].given.put(self._vector())
        self._sent.append(self._collected)
        self._collected = []

    def _complete(self) -> Iterator[Any]:
        if not self._sent and self._collected:  # a small model: not worth a thread
            self._comm.sum_(self._vector())
            yield from self._collected
            return
        if self._collected:
            self._send_off()
        for thread in self._threads:
            thread.given.put(None)
        for number, spans in enumerate(self._sent):
            with telemetry.timed("exchange"):
                self._threads[number % len(self._channels)].wait()
            yield from spans


class _Thread:
    """Sums what it is given, in that order, until it is given nothing more."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self.given: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        # A daemon: a worker that fails meanwhile must be able to end although the others never answer.
        threading.Thread(target=self._run, args=(schedule, transport), name="sums", daemon=True).start()

    def _run(self, schedule: Schedule, transport: Transport) -> None:
        try:
            for vector in iter(self.given.get, None):
                all_reduce(schedule, transport, vector)
                self._done.put(None)
        except Exception as error:
            self._done.put(error)

    def wait(self) -> None:
        """For the next of the sums; what went wrong in the thread is raised here."""
        if error := self._done.get():
            raise error
