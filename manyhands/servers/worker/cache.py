"""One push and one pull per host and step, whatever the number of its workers (Nexus).

The workers of a host share one replica and add up their gradients in its memory; the first of them speaks with the
servers for all. What the servers see is one worker per host.
"""

from collections.abc import Callable
from dataclasses import replace

from manyhands.comm.transports.host import Host
from manyhands.replica.layout import Span
from manyhands.replica.part import Share
from manyhands.servers.worker.client import Servers


class HostServers:
    """The servers as the workers of one host see them; `line` is there on the one that speaks.

    Inside a host all workers take every step together. Where the hosts do not, nobody else sees to that: a worker that
    is out of data takes part in its neighbours' steps, with nothing, until they are out of data too.
    """

    keeps_back = False  # what the one that speaks keeps back is in the host's memory

    def __init__(self, host: Host, line: Servers | None, *, lockstep: bool) -> None:
        self._host = host
        self._rounds_before = 0  # steps that were made in generations before this one
        self._flushes = 0  # in this one
        self._serial = 0  # steps and flushes in all generations
        self._line = line
        self._lockstep = lockstep
        self._met = False
        if line:
            line.speaks_for = host.size

    def go_on(self, rounds: int) -> None:
        self._rounds_before = rounds
        if self._line:
            self._line.go_on(rounds)

    def made(self, steps: int) -> int:
        return self._rounds_before + self._flushes + steps

    def take_over(self, before: "HostServers | None") -> None:
        """Go on with what was kept back in the generation before."""
        serial = self._rounds_before
        if not self._lockstep:  # servers do not know what the workers of a host have done together
            serial = int(max(row[0] for row in self._host.exchange([before._serial if before else 0.0])))
        self._serial = serial
        if self._line:
            self._line.recall(serial)

    def wait(self) -> None:
        if not self._lockstep and not self._met:
            self._host.exchange([1.0])
        self._met = False
        if self._line:
            self._line.settle()  # the neighbours write their gradients where those of the last step are
            self._line.wait()
        self._host.barrier()

    def held(self, share: Share) -> Share:
        if not self._lockstep:
            everyone = sum(row[0] for row in self._host.exchange([float(share.samples)]))
            share = replace(share, total=lambda: everyone)
        return self._line.held(share) if self._line else share

    def push(self, span: Span) -> None:
        assert self._line, "the worker that speaks with the servers owns all spans"
        self._line.push(span)

    def finish(self) -> None:
        if self._line:
            self._line.finish()
        if not self._lockstep:
            self._host.barrier()  # else neighbours would count what dies with the one that speaks
        self._serial += 1

    def flush(self) -> None:
        has_flushed = self._line.flush() if self._line else False
        flushed = int(self._host.exchange([float(has_flushed)])[0][0])
        self._flushes += flushed
        self._serial += flushed

    def settle(self) -> None:
        if self._line:
            self._line.settle()

    def pull(self, *, whole: bool = True) -> None:
        if self._line:
            self._line.pull(whole=whole)
        self._host.barrier()

    def leave(self, take_part: Callable[[Share], object]) -> None:
        while any(row[0] for row in self._host.exchange([0.0])):
            self._met = True
            take_part(Share(parts=(), total=lambda: 0.0))
        self.flush()
        if self._line:
            self._line.leave(take_part)
