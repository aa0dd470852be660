"""The one executor of schedules, over any transport."""

from collections import deque

from torch import Tensor

from manyhands import telemetry
from manyhands.comm.collectives.schedule import Schedule, Transfer
from manyhands.comm.transports.transport import Handle, Transport

CHUNK_BYTES = 4 << 20
"""A transfer travels in chunks, so that one is added while the next are under way.

Measured over Gloo, 2 processes, 100 MB: 30 to 50 % less time than in one message; 256 kB is too small.
"""

CHUNKS_UNDER_WAY = 3


def all_reduce(schedule: Schedule, transport: Transport, vector: Tensor) -> None:
    """Sum a contiguous vector over all ranks, in place; all ranks end bit-identical.

    After an exception the vector holds partial sums.
    """
    flat = vector.detach().view(-1)
    turns = schedule.turns[transport.rank]
    scratch = _scratch(flat, [_piece(schedule, flat, take) for _, take in turns if take and take.reduce])
    for give, take in turns:
        sends = _send(transport, give.target, _piece(schedule, flat, give)) if give else []
        if take and take.reduce:
            _receive_and_add(transport, take.source, _piece(schedule, flat, take), scratch)
        elif take:
            _receive(transport, take.source, _piece(schedule, flat, take))
        for handle in sends:
            handle.wait()


def _piece(schedule: Schedule, flat: Tensor, transfer: Transfer) -> Tensor:
    return flat[schedule.cut(transfer.parts, flat.numel())]


def _scratch(flat: Tensor, sums: list[Tensor]) -> Tensor:
    """Room for the chunks under way, or for the largest sum to be received if that is less."""
    largest = max((piece.numel() for piece in sums), default=0)
    return flat.new_empty(min(largest, CHUNKS_UNDER_WAY * _chunk(flat)))


def _chunk(vector: Tensor) -> int:
    return CHUNK_BYTES // vector.element_size()


def _chunks(piece: Tensor) -> list[Tensor]:
    return [piece[start : start + _chunk(piece)] for start in range(0, piece.numel(), _chunk(piece))]


def _send(transport: Transport, peer: int, piece: Tensor) -> list[Handle]:
    telemetry.count("bytes_sent", piece.nbytes)
    return [transport.send(peer, chunk) for chunk in _chunks(piece)]


def _receive(transport: Transport, peer: int, piece: Tensor) -> None:
    for handle in [transport.receive(peer, chunk) for chunk in _chunks(piece)]:
        handle.wait()
    telemetry.count("bytes_received", piece.nbytes)


def _receive_and_add(transport: Transport, peer: int, piece: Tensor, scratch: Tensor) -> None:
    """Each chunk arrives in the place in `scratch` that the one `CHUNKS_UNDER_WAY` before it has left."""
    under_way: deque[tuple[Handle, Tensor, Tensor]] = deque()
    for number, own in enumerate(_chunks(piece)):
        if len(under_way) == CHUNKS_UNDER_WAY:
            _add(*under_way.popleft())
        start = number % CHUNKS_UNDER_WAY * _chunk(piece)
        arriving = scratch[start : start + own.numel()]
        under_way.append((transport.receive(peer, arriving), arriving, own))
    for arrival in under_way:
        _add(*arrival)
    telemetry.count("bytes_received", piece.nbytes)


def _add(handle: Handle, arrived: Tensor, own: Tensor) -> None:
    handle.wait()
    own += arrived
