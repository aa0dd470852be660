"""Sums by a printable schedule over point-to-point messages: ring, tree and the like."""

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.comm.collectives.executor import all_reduce
from manyhands.comm.collectives.schedule import Hosts
from manyhands.comm.comm import Comm
from manyhands.comm.pairs import swap
from manyhands.comm.transports.transport import Transport


class ScheduledComm(Comm):
    """Every worker a replica of its own, summing the way the named topology says."""

    def __init__(self, transport: Transport, topology: str, hosts: Hosts, control: Comm) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._control = control  # flags are not part of the published traffic
        self.schedule = TOPOLOGIES[topology](self.size, hosts)

    def sum_(self, vector: Tensor) -> None:
        with telemetry.timed("exchange"):
            all_reduce(self.schedule, self._transport, vector)

    def swap(self, peer: int, vector: Tensor) -> Tensor:
        return swap(self._transport, peer, vector)

    def any_(self, flags: Tensor) -> Tensor:
        return self._control.any_(flags)
