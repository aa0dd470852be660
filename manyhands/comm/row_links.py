"""Rows of matrices, from each worker to one worker of every other host.

Messages are numbered, and those of one number arrive in the order of sending. Sender and receiver know how long they
are.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.between import BetweenHosts
from manyhands.comm.transports.transport import Handle, Transport


class RowLinks:
    """This worker's place among all: a worker with the local number i speaks to worker i (modulo their number) of every
    other host."""

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        rank: int,
        between: BetweenHosts,
        channel: Callable[[int], Transport],
    ) -> None:
        """`channel(number)` gives messages that no other number sees."""
        self.rank = rank
        self.size = sum(map(len, hosts))
        self.local = next(ranks for ranks in hosts if rank in ranks)
        others = [ranks for ranks in hosts if ranks is not self.local]
        mine = self.local.index(rank)
        self.targets = [ranks[mine % len(ranks)] for ranks in others]
        self.sources = [
            source
            for ranks in others
            for number, source in enumerate(ranks)
            if number % len(self.local) == mine
        ]
        self._between = between
        self._channel = channel
        self._channels: dict[int, Transport] = {}

    def send(self, number: int, rows: Tensor) -> list[Handle]:
        telemetry.count("bytes_sent", rows.nbytes * len(self.targets))
        return [self._numbered(number).send(target, rows) for target in self.targets]

    def receive(self, number: int, source: int, into: Tensor) -> Handle:
        telemetry.count("bytes_received", into.nbytes)
        return self._numbered(number).receive(source, into)

    def start_sum(self, table: Tensor) -> Callable[[], None]:
        """A few numbers, of which each host gives its own."""
        return self._between.start_quick(table)

    def _numbered(self, number: int) -> Transport:
        if number not in self._channels:
            self._channels[number] = self._channel(number)
        return self._channels[number]
