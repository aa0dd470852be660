"""How many sessions the servers serve: those that a script makes before it uses the first of them.

A server runs the script as far as that and no further, so it cannot have the model of a session that is made later. It
writes down how far it has come, in the host's memory and, where there are several hosts, in the run's store.
"""

import contextlib
import struct
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from manyhands.cluster.worker.rendezvous import Neighbourhood
from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost, UsageError

_BOARD = (1 << 61) - (1 << 41)  # in the host's memory, below that of parts
_MADE = struct.Struct("qq")  # sessions, and whether there will be no more
_KEY = "sessions"
_PATIENCE_S, _LOOK_EVERY_S = 300.0, 0.01


def tell(made: int, *, is_last: bool, neighbours: Neighbourhood, arena: Arena) -> None:
    """By a server, each time."""
    said = _MADE.pack(made, is_last)
    if neighbours.store is not None:
        # Where the worker that keeps the store is gone, so is this generation: in the next one the server tells again.
        with contextlib.suppress(dist.DistNetworkError):
            neighbours.store.set(_KEY, said)
    arena.at(_BOARD, _MADE.size)[: _MADE.size] = said


def require(number: int, neighbours: Neighbourhood, arena: Arena, check: Callable[[], None]) -> None:
    """By a worker that makes session `number`: wait until the servers make it too, or refuse if they never will."""
    until_s = time.monotonic() + _PATIENCE_S
    look = _look(neighbours.store, arena)
    while True:
        made, is_last = _MADE.unpack(look())
        if made > number:
            return
        if is_last:
            raise UsageError(
                f"the servers of this run serve {made} session{'s' * (made > 1)}, those that the script makes before "
                f"it uses the first one, and this is session {number + 1}: move its mh.session(…) up, or use a "
                "strategy without servers"
            )
        if time.monotonic() > until_s:
            raise PeerLost(f"no server has made session {number + 1} within {_PATIENCE_S:g} s")
        check()
        time.sleep(_LOOK_EVERY_S)


def _look(store: Any, arena: Arena) -> Callable[[], bytes]:
    if store is not None:
        return lambda: bytes(store.get(_KEY))
    place = arena.at(_BOARD, _MADE.size)
    return lambda: bytes(place[: _MADE.size])
