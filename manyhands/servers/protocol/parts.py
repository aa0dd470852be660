"""Servers of replicas that are in parts: each part has servers of its own, and workers tell them which part it is.

A server has the whole model and does not know how workers divide it. So the first worker that has a part writes down
which tensors are in it: in the host's memory or, where there are several hosts, in the run's store.
"""

import struct
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from torch.optim import Optimizer

from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost
from manyhands.replica.part import Part
from manyhands.replica.state.slice_of import TensorSlice
from manyhands.servers.protocol.server_group import ServerGroup

_BOARD = (1 << 61) - (1 << 40)  # in the host's memory, below what servers and workers have in common
_PART_BYTES = 1 << 24
_PARTS = 1 << 8  # of a session
_PATIENCE_S, _LOOK_EVERY_S = 300.0, 0.01
_LENGTH = struct.Struct("q")


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One parameter of a part: its name, and where it lies in the whole tensor."""

    name: str
    shape: tuple[int, ...]
    cut: bool
    dim: int | None
    start: int
    stop: int
    blocks: int

    @property
    def piece(self) -> TensorSlice:
        return TensorSlice(
            shape=self.shape, cut=self.cut, dim=self.dim, start=self.start, stop=self.stop, blocks=self.blocks
        )


def outline(part: Part, optimizer: Optimizer) -> list[Held]:
    """The trained parameters that are in a part."""
    found = []
    for name, param in zip(*part.trained(optimizer), strict=True):
        piece = part.piece(name, param)
        found.append(Held(name, piece.shape, piece.cut, piece.dim, piece.start, piece.stop, piece.blocks))
    return found


def tell(group: ServerGroup, arena: Arena, held: Iterable[Held]) -> None:
    """By the first worker that has the part."""
    content = msgspec.json.encode(list(held))
    store = group.neighbours.store
    if store is not None:
        store.set("part", content)
        return
    place = _place(group, arena)
    place[_LENGTH.size : _LENGTH.size + len(content)] = content
    _LENGTH.pack_into(place, 0, len(content))  # last: from here on it can be read


def told(group: ServerGroup, arena: Arena) -> list[Held]:
    """By a server, which waits for it."""
    store = group.neighbours.store
    content = store.get("part") if store is not None else _read(_place(group, arena))
    return msgspec.json.decode(content, type=list[Held])


def _place(group: ServerGroup, arena: Arena) -> Any:
    return arena.at(_BOARD + (group.session * _PARTS + group.number) * _PART_BYTES, _PART_BYTES)


def _read(place: Any) -> bytes:
    until_s = time.monotonic() + _PATIENCE_S
    while not (length := _LENGTH.unpack_from(place, 0)[0]):
        if time.monotonic() > until_s:
            raise PeerLost(
                f"no worker has said within {_PATIENCE_S:g} s which part of the model is served here"
            )
        time.sleep(_LOOK_EVERY_S)
    return bytes(place[_LENGTH.size : _LENGTH.size + length])
