"""The one executor of schedules, over any transport.

A vector passes as stripes, each of which is an all-reduce of its own, a round behind the stripe before it. While one
stripe is added up or waits for its peer, others are on the wire, and a tree, whose ranks mostly wait, works
on all its levels at once. What happens when is the same on all ranks, whatever the timing: messages between a
pair go out in the order in which they are expected.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.collectives.schedule import Schedule, Transfer, Turn
from manyhands.comm.transports.transport import Handle, Transport

PIECE_BYTES = 1 << 19
"""The longest message, about. Shorter ones cost more work per byte, longer ones leave the wire idle for longer."""


def all_reduce(schedule: Schedule, transport: Transport, vector: Tensor) -> None:
    """Sum a contiguous vector over all ranks, in place; all ranks end bit-identical.

    After an exception the vector holds partial sums.
    """
    flat = vector.detach().view(-1)
    length = stripe_bytes(schedule) // flat.element_size()
    for _ in all_reduce_each(schedule, transport, flat.split(length) if flat.numel() else ()):
        pass


def stripe_bytes(schedule: Schedule) -> int:
    """How long a stripe may be for its messages to be of `PIECE_BYTES`."""
    most = max((len(transfer.parts) for moves in schedule.rounds for transfer in moves), default=1)
    return PIECE_BYTES * schedule.parts // most


def all_reduce_each(schedule: Schedule, transport: Transport, stripes: Iterable[Tensor]) -> Iterator[Tensor]:
    """Sum flat vectors that come one by one, as many and as long on all ranks; yields each when it is complete."""
    under_way: deque[_Stripe] = deque()
    coming = iter(stripes)
    while True:
        vector = next(coming, None)
        if vector is not None:
            under_way.append(_Stripe(schedule, transport, vector))
        elif not under_way:
            return
        for stripe in under_way:
            stripe.advance()
        while under_way and under_way[0].is_complete:
            yield under_way.popleft().vector


class _Stripe:
    """One vector on its way through the rounds."""

    def __init__(self, schedule: Schedule, transport: Transport, vector: Tensor) -> None:
        self.vector = vector
        self.is_complete = False
        self._schedule = schedule
        self._transport = transport
        self._rounds: Iterator[Turn] = iter(schedule.turns[transport.rank])
        self._scratch: Tensor | None = None
        self._under_way: list[Handle] = []
        self._arriving: tuple[Tensor, Tensor] | None = None

    def advance(self) -> None:
        """Finish the round that was begun, and begin the next."""
        for handle in self._under_way:
            handle.wait()
        self._under_way.clear()
        if self._arriving:
            arrived, own = self._arriving
            own += arrived
            self._arriving = None
        turn = next(self._rounds, None)
        if turn is None:
            self.is_complete = True
        else:
            self._begin(*turn)

    def _begin(self, give: Transfer | None, take: Transfer | None) -> None:
        if take and (piece := self._piece(take)).numel():
            into = self._room(piece) if take.reduce else piece
            if take.reduce:
                self._arriving = into, piece
            telemetry.count("bytes_received", piece.nbytes)
            self._under_way.append(self._transport.receive(take.source, into))
        if give and (piece := self._piece(give)).numel():
            telemetry.count("bytes_sent", piece.nbytes)
            self._under_way.append(self._transport.send(give.target, piece))

    def _piece(self, transfer: Transfer) -> Tensor:
        return self.vector[self._schedule.cut(transfer.parts, self.vector.numel())]

    def _room(self, piece: Tensor) -> Tensor:
        """Where what is to be added arrives."""
        if self._scratch is None or self._scratch.numel() < piece.numel():
            self._scratch = piece.new_empty(piece.numel())
        return self._scratch[: piece.numel()]
