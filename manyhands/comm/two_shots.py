"""A sum of coded vectors over hosts in two shots: what is coded cannot be added up on the way.

Part p of a span belongs to host p. In the first shot every host sends host p its part, coded; host p decodes what it
gets, adds in 32 bits, and in the second shot sends the sum, coded again, to all. So each host sends 2 (N − 1) / N coded
vectors, as in a ring, in 2 rounds instead of 2 (N − 1), and all decode the same bytes.

What coding leaves out is kept where it was left out: in the first shot by the sender, in the second by the owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.codecs.codec import Codec
from manyhands.comm.transports.transport import Handle, Transport

FIRST, SECOND = range(2)
_ALIGN = 16  # elements: parts begin on cache lines


@dataclass(frozen=True)
class CodedLane:
    """The workers of a lane, one of each host, and their messages: a transport for each shot."""

    ranks: Sequence[int]
    mine: int
    """This worker's host."""
    shots: Sequence[Transport]


@dataclass(frozen=True)
class CodedPart:
    """One host's part of a span: which elements are coded, and which travel as they are."""

    coded: tuple[slice, ...]
    plain: tuple[slice, ...]

    @property
    def is_empty(self) -> bool:
        return not self.coded and not self.plain


def coded_parts(length: int, hosts: int, matrices: Sequence[slice]) -> list[CodedPart]:
    """A span in one part for each host; of the elements, those of `matrices` are coded."""
    edges = [min(length, -(-length * host // (hosts * _ALIGN)) * _ALIGN) for host in range(hosts)] + [length]
    plain, at = [], 0
    for piece in matrices:
        plain.append(slice(at, piece.start))
        at = piece.stop
    plain.append(slice(at, length))
    return [
        CodedPart(
            _inside(matrices, edges[host], edges[host + 1]), _inside(plain, edges[host], edges[host + 1])
        )
        for host in range(hosts)
    ]


def _inside(pieces: Sequence[slice], start: int, stop: int) -> tuple[slice, ...]:
    cut = (slice(max(piece.start, start), min(piece.stop, stop)) for piece in pieces)
    return tuple(piece for piece in cut if piece.start < piece.stop)


class CodedSum:
    """The sum of one span: `send`, then `answer`, then `finish`; all hosts do each for all spans in one order."""

    def __init__(
        self,
        lane: CodedLane,
        codec: Codec,
        vector: Tensor,
        parts: Sequence[CodedPart],
        before: Tensor | None,
        after: Tensor | None,
    ) -> None:
        """`before` was left out until now, and what is left out goes to `after`, where the codec keeps it."""
        self._lane, self._codec, self._vector, self._parts = lane, codec, vector, parts
        self._before, self._after = before, after
        self._others = [host for host in range(len(lane.ranks)) if host != lane.mine]
        self._arriving: list[tuple[int, Tensor, Handle]] = []
        self._leaving: list[Handle] = []

    def send(self) -> None:
        """The first shot."""
        if self._before is not None:
            self._vector.add_(self._before)
        if self._after is not None:
            self._after.zero_()
        own = self._parts[self._lane.mine]
        self._expect(FIRST, dict.fromkeys(self._others, own))
        for host in self._others:
            part = self._parts[host]
            message = self._encoded(part)
            if self._after is not None:
                self._keep(part, message)
            self._send(FIRST, [host], message)

    def answer(self) -> None:
        """The second shot, when all parts of the sum that is this host's are here."""
        own = self._parts[self._lane.mine]
        for _, message in self._arrived():
            with telemetry.timed("decode"):
                for piece, values in self._decoded(own, message):
                    self._vector[piece].add_(values)
        self._expect(SECOND, {host: self._parts[host] for host in self._others})
        message = self._encoded(own)
        if self._after is not None:
            self._keep(own, message)
        self._take(own, message)
        self._send(SECOND, self._others, message)

    def reply(self) -> None:
        """Two shots are all."""

    def finish(self) -> None:
        """Return when the sum is here, and all that this host sends has left."""
        for host, message in self._arrived():
            self._take(self._parts[host], message)
        while self._leaving:
            self._leaving.pop().wait()
        # A gradient that is not finite ends the run, or its step is left out: it must not come again with the next.
        if self._after is not None and not bool(torch.isfinite(self._after.sum())):
            self._after.zero_()

    def _expect(self, shot: int, parts: dict[int, CodedPart]) -> None:
        for host, part in parts.items():
            if not part.is_empty:
                message = torch.empty(self._size_bytes(part), dtype=torch.uint8)
                handle = self._lane.shots[shot].receive(self._lane.ranks[host], message)
                self._arriving.append((host, message, handle))
                telemetry.count("bytes_received", message.nbytes)

    def _arrived(self) -> list[tuple[int, Tensor]]:
        found = []
        for host, message, handle in self._arriving:
            with telemetry.timed("exchange"):
                handle.wait()
            found.append((host, message))
        self._arriving.clear()
        return found

    def _send(self, shot: int, hosts: Sequence[int], message: Tensor) -> None:
        for host in hosts if message.numel() else ():
            self._leaving.append(self._lane.shots[shot].send(self._lane.ranks[host], message))
            telemetry.count("bytes_sent", message.nbytes)

    def _encoded(self, part: CodedPart) -> Tensor:
        """The message for a part."""
        with telemetry.timed("encode"):
            message = torch.empty(self._size_bytes(part), dtype=torch.uint8)
            values = _joined(self._vector, part.coded)
            middle = self._coded_bytes(part)
            self._codec.encode(values, message[: self._codec.size_bytes(values.numel())])
            message[middle:].view(torch.float32).copy_(_joined(self._vector, part.plain))
        return message

    def _keep(self, part: CodedPart, message: Tensor) -> None:
        """What a message leaves out stays here."""
        assert self._after is not None
        with telemetry.timed("encode"):
            for piece, found in self._decoded(part, message):
                torch.sub(self._vector[piece], found, out=self._after[piece])

    def _take(self, part: CodedPart, message: Tensor) -> None:
        """The sum of a part, as its owner has coded it."""
        with telemetry.timed("decode"):
            for piece, values in self._decoded(part, message):
                self._vector[piece] = values

    def _decoded(self, part: CodedPart, message: Tensor) -> list[tuple[slice, Tensor]]:
        """Where values belong, and what they are."""
        length = _length(part.coded)
        values = torch.empty(length)
        self._codec.decode(message[: self._codec.size_bytes(length)], values)
        plain = message[self._coded_bytes(part) :].view(torch.float32)
        return [*_divided(values, part.coded), *_divided(plain, part.plain)]

    def _size_bytes(self, part: CodedPart) -> int:
        return self._coded_bytes(part) + 4 * _length(part.plain)

    def _coded_bytes(self, part: CodedPart) -> int:
        """What follows begins at a whole number."""
        return -(-self._codec.size_bytes(_length(part.coded)) // 4) * 4


def _length(pieces: Sequence[slice]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _joined(vector: Tensor, pieces: Sequence[slice]) -> Tensor:
    if len(pieces) == 1:
        return vector[pieces[0]]
    return torch.cat([vector[piece] for piece in pieces]) if pieces else vector[:0]


def _divided(values: Tensor, pieces: Sequence[slice]) -> list[tuple[slice, Tensor]]:
    return list(zip(pieces, values.split([piece.stop - piece.start for piece in pieces]), strict=True))
