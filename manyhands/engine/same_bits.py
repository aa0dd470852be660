"""When workers have agreed, all have the same parameters, to the bit: each pause holds them to it.

A worker that kept older values would train on, evaluate and give back another model than the others, and nothing else
would show it. A sum of the bits costs one pass over the parameters. Where each worker has computed the common values
itself, another processor may round otherwise: then worker 0's hold.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.engine.engine import Engine
from manyhands.errors import TornUpdate
from manyhands.replica.state.state import from_first
from manyhands.strategies.interface import Strategy

_ROUNDING = 1e-6  # of the norm of the parameters
_EXACT = (1 << 53) - 1  # whole numbers that a float holds
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hold(engine: Engine) -> None:
    """All workers have agreed; where a step is that of one process, each has made the same updates instead."""
    if type(engine.strategy).agree is Strategy.agree or engine.world.size == 1:
        return
    rows = engine.world.exchange(_row(engine))
    differ = False
    for ranks in engine.placed.mesh.peers():
        for rank in ranks[1:]:
            if rows[rank][0] == rows[ranks[0]][0]:
                continue
            differ = True
            if engine.served or _is_apart(rows[rank], rows[ranks[0]]):
                raise TornUpdate(
                    f"worker {rank} has other parameters than worker {ranks[0]} after all have agreed: their norms are "
                    f"{rows[rank][1]:.9g} and {rows[ranks[0]][1]:.9g}; go on from the last checkpoint (--resume, or "
                    "session.resume in a script)"
                )
    if differ:
        from_first(engine.replica.params, engine.replica, engine.comm)
        engine.placed.peers.host.barrier()


def _row(engine: Engine) -> list[float]:
    every = list(engine.replica.flat.values())  # of real numbers
    bits = sum(_bits(values) for values in every)
    return [float(bits & _EXACT), math.hypot(*(float(values.norm()) for values in every))]


def _bits(values: Tensor) -> int:
    """The sum of a vector's bits, eight bytes at a time: as fast as the memory."""
    plain, size = values.detach().reshape(-1), values.element_size()
    whole = len(plain) * size // 8 * 8 // size
    rest = plain[whole:].view(_WHOLE[size])
    return int(plain[:whole].view(torch.int64).sum()) + int(rest.sum(dtype=torch.int64))


def _is_apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return not abs(one[1] - other[1]) <= _ROUNDING * (1.0 + other[1])
