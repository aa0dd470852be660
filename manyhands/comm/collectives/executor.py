"""The one executor of schedules, over any transport.

A vector passes as stripes, each of which is an all-reduce of its own. A few of them go through the rounds side by
side, and the next few follow a round behind: while one is added up or waits for its peer, others are being sent, and a
tree, whose ranks mostly wait, works on all its levels at once. What happens when is the same on all ranks, whatever
the timing: messages between a pair go out in the order in which they are expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from manyhands import telemetry
from manyhands.comm.collectives.schedule import Schedule, Transfer, Turn

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.transports.transport import Handle, Transport

PIECE_BYTES = 1 << 19
"""The longest message, about. Shorter ones cost more work per byte, longer ones leave the network idle for longer."""

SIDE_BY_SIDE = 4
"""Stripes that begin together: with one alone, every round would wait for its messages to cross."""


def all_reduce(schedule: Schedule, transport: Transport, vector: Tensor) -> None:
    """Sum a contiguous vector over all ranks, in place; all ranks end bit-identical.

    After an exception the vector holds partial sums.
    """
    flat = vector.detach().view(-1)
    most_parts = max((len(transfer.parts) for moves in schedule.rounds for transfer in moves), default=1)
    length = PIECE_BYTES * schedule.parts // most_parts // flat.element_size()
    stripes = [_Stripe(schedule, transport, stripe) for stripe in flat.split(length)]
    for now in range(len(schedule.rounds) + -(-len(stripes) // SIDE_BY_SIDE)):
        for stripe in stripes[: (now + 1) * SIDE_BY_SIDE]:
            stripe.advance()


class _Stripe:
    """A part of a vector on its way through the rounds."""

    def __init__(self, schedule: Schedule, transport: Transport, vector: Tensor) -> None:
        self._vector = vector
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
        if turn := next(self._rounds, None):
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
        return self._vector[self._schedule.cut(transfer.parts, self._vector.numel())]

    def _room(self, piece: Tensor) -> Tensor:
        """Where what is to be added arrives."""
        if self._scratch is None or self._scratch.numel() < piece.numel():
            self._scratch = piece.new_empty(piece.numel())
        return self._scratch[: piece.numel()]
