"""The sum of a span over hosts as thin matrices (`codecs/power_sgd.py`).

One host of the lane owns a span. It adds up what all have made with the old directions, makes that orthonormal and
tells all, so that all have the same bits; then all send each other what they have in the new directions, and every host
adds it up in the order of hosts, element by element.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.transport import Handle
from manyhands.comm.two_shots import FIRST, SECOND, CodedLane

THIRD = 2
_NOTHING = 1e-6  # of a column's norm: what is left of one that depends on those before it


@dataclass(frozen=True)
class LowRankCut:
    """The matrices of a span, as slices of it with the width of their rows, and what travels as it is."""

    matrices: tuple[tuple[slice, int], ...]
    plain: tuple[slice, ...]

    def start(self, rank: int, seed: int) -> list[Tensor]:
        """The first directions, by chance, and the same on all hosts."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(width, rank, generator=generator) for _, width in self.matrices]


def low_rank_cut(length: int, pieces: Sequence[slice], widths: Sequence[int], rank: int) -> LowRankCut:
    """Of the pieces, those for which thin matrices are less."""
    matrices = []
    for piece, width in zip(pieces, widths, strict=True):
        size = piece.stop - piece.start
        if 2 * rank * (-(-size // width) + width) < size:
            matrices.append((piece, width))
    plain, at = [], 0
    for piece, _ in matrices:
        plain.append(slice(at, piece.start))
        at = piece.stop
    plain.append(slice(at, length))
    return LowRankCut(tuple(matrices), tuple(piece for piece in plain if piece.start < piece.stop))


class LowRankSum:
    """The sum of one span: `send`, `answer`, `reply`, `finish`; all hosts do each for all spans in one order."""

    def __init__(
        self,
        lane: CodedLane,
        cut: LowRankCut,
        directions: list[Tensor],
        vector: Tensor,
        before: Tensor | None,
        after: Tensor,
        owner: int,
    ) -> None:
        """`directions` are those of the step before, and become those of this one."""
        self._lane, self._cut, self._directions, self._vector = lane, cut, directions, vector
        self._before, self._after, self._owner = before, after, owner
        self._others = [host for host in range(len(lane.ranks)) if host != lane.mine]
        self._leaving: list[tuple[Tensor, Handle]] = []
        self._arriving: dict[int, tuple[Tensor, Handle]] = {}
        self._steps_done = 0

    def send(self) -> None:
        """What this host has in the old directions goes to the owner."""
        if self._before is not None:
            self._vector.add_(self._before)
        with telemetry.timed("encode"):
            self._matrices = [self._matrix(number) for number in range(len(self._cut.matrices))]
            products = [m @ q for m, q in zip(self._matrices, self._directions, strict=True)]
            self._own = _flat([*products, *(self._vector[piece] for piece in self._cut.plain)])
            self._shapes = [one.shape for one in products]
        if self._lane.mine == self._owner:
            for host in self._others:
                self._expect(FIRST, host, self._own.numel())
        else:
            self._send(FIRST, [self._owner], self._own)
            self._expect(SECOND, self._owner, self._own.numel())

    def answer(self) -> None:
        """The owner tells all the new directions of rows."""
        if self._lane.mine != self._owner:
            return
        total = self._summed(self._own)
        with telemetry.timed("encode"):
            products, at = self._unflat(total, self._shapes)
            total = _flat([*(_orthonormal(one) for one in products), total[at:]])
        self._own = total
        self._send(SECOND, self._others, total)

    def reply(self) -> None:
        """What this host has in the new directions goes to all; the rest stays."""
        if self._lane.mine != self._owner:
            self._own = self._arrived(self._owner)
        with telemetry.timed("encode"):
            self._rows, at = self._unflat(self._own, self._shapes)
            self._plain = self._own[at:]
            mine = [m.t() @ p for m, p in zip(self._matrices, self._rows, strict=True)]
            self._after.zero_()
            for number, (piece, _) in enumerate(self._cut.matrices):
                left = self._matrices[number] - self._rows[number] @ mine[number].t()
                self._after[piece] = left.reshape(-1)[: piece.stop - piece.start]
            self._mine = _flat(mine)
            self._widths = [one.shape for one in mine]
        for host in self._others if mine else ():
            self._expect(THIRD, host, self._mine.numel())
        if mine:
            self._send(THIRD, self._others, self._mine)

    def finish(self) -> None:
        """Return when the sum is here, and all that this host sends has left."""
        columns = self._unflat(self._summed(self._mine), self._widths)[0] if self._widths else []
        with telemetry.timed("decode"):
            for number, (piece, _) in enumerate(self._cut.matrices):
                self._directions[number].copy_(columns[number])
                found = _outer(self._rows[number], columns[number])
                self._vector[piece] = found.reshape(-1)[: piece.stop - piece.start]
            plain = self._plain.split([piece.stop - piece.start for piece in self._cut.plain])
            for piece, values in zip(self._cut.plain, plain, strict=True):
                self._vector[piece] = values
        while self._leaving:
            self._leaving.pop()[1].wait()
        if not bool(torch.isfinite(self._after.sum())):
            self._after.zero_()  # a gradient that is not finite must not come again
        self._renew()

    def _renew(self) -> None:
        """A direction that led nowhere, as where the gradient of a step was zero or not finite, would stay so: others
        by chance take its place, the same on all hosts."""
        for number, one in enumerate(self._directions):
            lost = ~(torch.isfinite(one).all(0) & (one != 0).any(0))
            if bool(lost.any()):
                one[:, lost] = self._cut.start(one.shape[1], number)[number][:, lost]

    def _matrix(self, number: int) -> Tensor:
        piece, width = self._cut.matrices[number]
        values = self._vector[piece]
        rows = -(-values.numel() // width)
        if values.numel() == rows * width:
            return values.view(rows, width).clone()
        padded = values.new_zeros(rows * width)
        padded[: values.numel()] = values
        return padded.view(rows, width)

    def _unflat(self, flat: Tensor, shapes: Sequence[torch.Size]) -> tuple[list[Tensor], int]:
        found, at = [], 0
        for shape in shapes:
            found.append(flat[at : at + shape.numel()].view(shape))
            at += shape.numel()
        return found, at

    def _summed(self, own: Tensor) -> Tensor:
        """Over all hosts, in their order."""
        parts = [
            own if host == self._lane.mine else self._arrived(host) for host in range(len(self._lane.ranks))
        ]
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        return total

    def _expect(self, shot: int, host: int, length: int) -> None:
        into = torch.empty(length)
        self._arriving[host] = into, self._lane.shots[shot].receive(self._lane.ranks[host], into)
        telemetry.count("bytes_received", into.nbytes)

    def _arrived(self, host: int) -> Tensor:
        values, handle = self._arriving.pop(host)
        with telemetry.timed("exchange"):
            handle.wait()
        return values

    def _send(self, shot: int, hosts: Sequence[int], values: Tensor) -> None:
        for host in hosts:
            self._leaving.append((values, self._lane.shots[shot].send(self._lane.ranks[host], values)))
            telemetry.count("bytes_sent", values.nbytes)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0)


def _orthonormal(columns: Tensor) -> Tensor:
    """By Gram and Schmidt; a column that depends on those before it becomes zero."""
    found = columns.clone()
    for number in range(found.shape[1]):
        column = found[:, number]
        size = float(column.norm())
        for earlier in range(number):
            column.sub_(found[:, earlier] * (found[:, earlier] @ column))
        left = float(column.norm())
        if left <= _NOTHING * size:  # also where both are zero
            column.zero_()
        else:
            column.div_(left)
    return found


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    """P Qᵀ, element by element: the same bits on every processor."""
    found = rows[:, :1] * columns[:, 0]
    for number in range(1, rows.shape[1]):
        found.add_(rows[:, number : number + 1] * columns[:, number])
    return found
