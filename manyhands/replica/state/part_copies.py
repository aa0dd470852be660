"""All that a part of a replica is, after each of the last two commits, in memory of the host that outlives its worker.

For strategies that change parameters otherwise than by the optimizer, or keep something beside them: an undo log of
the optimizer's updates does not know of that. A worker writes a copy before it comes to the barrier at which a step
counts, into one of two places in turn, so that the copy before it stays until the step counts. When a worker dies, the
others put back the copy of the last commit that counts, and a new worker begins with that of the dead one.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.comm.transports.arena import PAGE, give_back, require_memory
from manyhands.errors import TornUpdate
from manyhands.replica.part_place import PARTS, PartPlace
from manyhands.replica.replica import Replica
from manyhands.replica.state.buffers import dense
from manyhands.replica.state.transcoding import States, put_together, take_apart

_SLOT = 1 << 41  # of addresses, from one copy to the other
_VALUES = 1 << 40  # where the values begin in it; what they are comes before
_HEADER = struct.Struct(
    "3q"
)  # number of the copy, or 0 while it is written; commits; bytes that say what is there


class _CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a copy, beside the values of its tensors."""

    steps: int
    settings: list[float]
    states: States
    tensors: list[tuple[str, str, list[int]]]
    """Name, type and shape."""


@dataclass(frozen=True)
class _CopySlot:
    """One of the two places."""

    fd: int
    start: int

    def head(self) -> tuple[int, int, int]:
        found = os.pread(self.fd, _HEADER.size, self.start)
        return _HEADER.unpack(found) if len(found) == _HEADER.size else (0, 0, 0)

    def begin(self, said: bytes) -> None:
        os.pwrite(self.fd, _HEADER.pack(0, 0, 0), self.start)
        os.pwrite(self.fd, said, self.start + PAGE)

    def end(self, number: int, commits: int, length: int) -> None:
        os.pwrite(self.fd, _HEADER.pack(number, commits, length), self.start)

    def said(self) -> _CopyRecord:
        return msgspec.json.decode(os.pread(self.fd, self.head()[2], self.start + PAGE), type=_CopyRecord)

    def values(self, length: int) -> Tensor:
        """So many bytes, which all processes see that map them."""
        os.posix_fallocate(self.fd, self.start + _VALUES + length - 1, 1)
        region = mmap.mmap(self.fd, length, offset=self.start + _VALUES)
        return torch.frombuffer(region, dtype=torch.uint8)

    def tensors(self) -> dict[str, Tensor]:
        """What is in the copy, as it lies there."""
        said, found, at = self.said(), {}, 0
        values = self.values(_length(said.tensors))
        for name, dtype, shape in said.tensors:
            size = _size(dtype, shape)
            found[name] = values[at : at + size].view(getattr(torch, dtype)).view(shape)
            at += _rounded(size)
        return found


def _size(dtype: str, shape: list[int]) -> int:
    return int(getattr(torch, dtype).itemsize * torch.Size(shape).numel())


def _rounded(size: int) -> int:
    return -(-size // 64) * 64


def _length(tensors: list[tuple[str, str, list[int]]]) -> int:
    return max(PAGE, sum(_rounded(_size(dtype, shape)) for _, dtype, shape in tensors))


def _places(place: PartPlace, generation: int) -> tuple[_CopySlot, _CopySlot]:
    start = place.start(generation) + PAGE
    return _CopySlot(place.fd, start), _CopySlot(place.fd, start + _SLOT)


class PartCopies:
    """The copies of a replica's own part, which this worker makes."""

    def __init__(self, replica: Replica, place: PartPlace, generation: int) -> None:
        self._replica, self._place, self._generation = replica, place, generation
        self._copies = _places(place, generation)
        self._values: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._number = 0
        place.begin(generation, 1)
        vectors = [replica.params, *replica.updates.vectors.values()]
        require_memory(2 * sum(vector.nbytes for vector in vectors), "copies of this worker's part")

    def make(self, commits: int) -> None:
        """This is what the part is if so many steps and agreements count."""
        loose: dict[str, Tensor]
        states, loose = take_apart(self._replica.updates.export())
        tensors = _tensors(self._replica) | {f"state/{name}": value for name, value in loose.items()}
        found = [(name, _type(value), list(value.shape)) for name, value in tensors.items()]
        said = msgspec.json.encode(
            _CopyRecord(
                steps=self._replica.steps, settings=self._replica.settings, states=states, tensors=found
            )
        )
        at = self._number % 2
        copy, length = self._copies[at], _length(found)
        copy.begin(said)
        if len(self._values[at]) < length:
            self._values[at] = copy.values(length)
        self._number += 1
        self._write(self._values[at], tensors)
        copy.end(self._number, commits, len(said))

    def _write(self, values: Tensor, tensors: dict[str, Tensor]) -> None:
        at = 0
        for value in tensors.values():
            if value.numel():
                values[at : at + value.nbytes].copy_(value.detach().reshape(-1).view(torch.uint8))
            at += _rounded(value.nbytes)

    def complete(self) -> None:
        """The part has all that was before this generation."""
        self._place.complete(self._generation)

    def put_back(self, commits: int) -> None:
        """Parameters, optimizer state and what the strategy keeps are again what they were when so many steps and
        agreements counted."""
        _restore(self._replica, _newest(self._copies, commits))

    @property
    def part(self) -> int:
        """The number of the part in the memory of the host."""
        return self._place.part

    def decide(self, commits: int) -> None:
        """This generation is over, and so many commits count, in all parts of all replicas."""
        for part in range(PARTS):
            self._place.of(part).decide(self._generation, commits)

    def release(self) -> None:
        self._values.clear()
        for copy in self._copies:
            give_back(copy.fd, copy.start, copy.start + _SLOT)


def take_left(replica: Replica, place: PartPlace, before: int) -> None:
    """A replica becomes what the worker of a part has left, after the last commit that counts."""
    generation, found = place.newest(before)
    _restore(replica, _newest(_places(place, generation), found.steps))


def _newest(copies: tuple[_CopySlot, _CopySlot], commits: int | None) -> _CopySlot:
    """The newest of what so many commits have made. If that was not decided, no step of the generation counts."""
    made = [(one.head(), one) for one in copies if one.head()[0]]
    if commits is None and made:
        commits = min(head[1] for head, _ in made)
    found = [(head[1], head[0], one) for head, one in made if commits is not None and head[1] <= commits]
    if not found:
        raise TornUpdate("no copy is left of a part of the replica; go on from the last checkpoint")
    return max(found, key=lambda one: one[:2])[2]


def _tensors(replica: Replica) -> dict[str, Tensor]:
    """All that has values in it, where it lies."""
    return {
        "params": replica.params,
        **{f"vector/{name}": vector for name, vector in replica.updates.vectors.items()},
        **{f"buffer/{index}": part for index, part in enumerate(dense(replica.part.buffers()))},
        **{f"kept/{name}": value for name, value in replica.kept.items()},
    }


def _restore(replica: Replica, copy: _CopySlot) -> None:
    said, tensors = copy.said(), copy.tensors()
    replica.steps, replica.settings = said.steps, said.settings
    own = _tensors(replica)
    with torch.no_grad():
        for name, value in tensors.items():
            if name in own and own[name].shape == value.shape and not name.startswith("kept/"):
                own[name].copy_(value)
    loose = _named(tensors, "state/")
    replica.updates.restore(replica.owned, put_together(said.states, loose))
    replica.kept.clear()
    replica.kept.update(_named(tensors, "kept/"))


def _named(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(kind): value.clone() for name, value in tensors.items() if name.startswith(kind)
    }


def _type(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")
