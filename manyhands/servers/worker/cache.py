"""One push and one pull per host and step, whatever the number of its workers (Nexus).

The workers of a host share one replica and add up their gradients in its memory; the first of them speaks with the
servers for all. What the servers see is one worker per host.
"""

from collections.abc import Callable
from dataclasses import replace

from manyhands.comm.transports.host import Host
from manyhands.errors import UsageError
from manyhands.replica.layout import Span
from manyhands.replica.part import Share
from manyhands.servers.worker.client import Servers


class SpokenFor:
    """The servers for a worker for which a neighbour speaks: it says nothing."""

    def go_on(self, rounds: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def begin(self, share: Share) -> Share:
        return share

    def push(self, span: Span) -> None:
        raise UsageError(f"span {span.index}: the worker that speaks with the servers owns all spans")

    def finish(self) -> None:
        pass

    def flush(self) -> bool:
        return False

    def settle(self) -> None:
        pass

    def pull(self, *, whole: bool = True) -> None:
        pass

    def recall(self, serial: int) -> None:
        pass

    def leave(self, take_part: Callable[[Share], object]) -> None:
        pass


class HostServers:
    """The servers as the workers of one host see them, where all workers of all hosts take every step together."""

    def __init__(self, host: Host, servers: Servers | SpokenFor) -> None:
        self._host = host
        self._servers = servers
        self._rounds_before = 0  # steps that were made in generations before this one
        self._flushes = 0  # in this one
        self._serial = 0  # steps and flushes in all generations

    def defers(self) -> bool:
        return False  # what the worker that speaks defers is in the host's memory

    def go_on(self, rounds: int) -> None:
        self._rounds_before = rounds
        self._servers.go_on(rounds)

    def made(self, steps: int) -> int:
        return self._rounds_before + self._flushes + steps

    def take_over(self, before: "HostServers | None") -> None:
        """Go on with what was deferred in the generation before."""
        self._serial = self._latest(before)
        self._servers.recall(self._serial)

    def _latest(self, before: "HostServers | None") -> int:
        return self._rounds_before

    def wait(self) -> None:
        self._servers.settle()  # the neighbours write their gradients where those of the last step are
        self._servers.wait()
        self._host.barrier()

    def begin(self, share: Share) -> Share:
        return self._servers.begin(share)

    def push(self, span: Span) -> None:
        self._servers.push(span)

    def finish(self) -> None:
        self._servers.finish()
        self._serial += 1

    def flush(self) -> None:
        flushed = int(self._host.exchange([float(self._servers.flush())])[0][0])
        self._flushes += flushed
        self._serial += flushed

    def settle(self) -> None:
        self._servers.settle()

    def pull(self, *, whole: bool = True) -> None:
        self._servers.pull(whole=whole)
        self._host.barrier()

    def leave(self, take_part: Callable[[Share], object]) -> None:
        """This worker is out of data; it takes part in its neighbours' steps, with nothing, until they are too."""
        while any(row[0] for row in self._host.exchange([0.0])):
            self._join_step()
            take_part(Share(parts=(), samples=0, total=lambda: 0.0))
        self.flush()
        self._servers.leave(take_part)

    def _join_step(self) -> None:
        """The neighbours know that this worker takes part in the next step."""


class UnsteppedHostServers(HostServers):
    """The same where hosts do not take every step together: its workers see to it themselves that they do."""

    def __init__(self, host: Host, servers: Servers | SpokenFor) -> None:
        super().__init__(host, servers)
        self._met = False

    def _latest(self, before: HostServers | None) -> int:
        # Servers do not know what the workers of a host have done together.
        return int(max(row[0] for row in self._host.exchange([before._serial if before else 0.0])))

    def wait(self) -> None:
        if not self._met:
            self._host.exchange([1.0])
        self._met = False
        super().wait()

    def begin(self, share: Share) -> Share:
        everyone = sum(row[0] for row in self._host.exchange([float(share.samples)]))
        return super().begin(replace(share, total=lambda: everyone))

    def finish(self) -> None:
        self._servers.finish()
        self._host.barrier()  # else neighbours would count what dies with the one that speaks
        self._serial += 1

    def _join_step(self) -> None:
        self._met = True
