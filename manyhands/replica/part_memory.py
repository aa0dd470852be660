"""The memory of a part of a replica: it outlives the workers that have the part.

It lies in the memory that all processes of the host share, at a place that follows from the generation and the part.
So a worker that takes the place of a dead one finds there what the dead one had: parameters, optimizer state, the sum
of the gradients, the undo log. A header says whether the part was complete when its generation began, and, once the
generation is over, how many of its steps count.
"""

import mmap
import os
import struct
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyhands.comm.transports import slots
from manyhands.comm.transports.arena import PAGE, Arena, give_back
from manyhands.comm.transports.counters import Counters, StepCounter
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.slots import Slots
from manyhands.errors import TornUpdate
from manyhands.replica.memory import Memory, SharedMemory

_BASE = 1 << 60  # in the host's memory: above what generations hand out, below what servers do
_GENERATIONS = 32  # that have a place at the same time
_GENERATION = 1 << 54  # from one generation's parts to the next
_PART = 1 << 43
_SESSIONS, PARTS = 16, 128  # that have a place in a generation
_HEADER = struct.Struct(
    "4q"
)  # generation + 1, workers that have the part, whether complete, steps that count + 1


@dataclass(frozen=True)
class PartPlace:
    """Where a part of a replica of one session lies in the memory `fd`, by generation."""

    fd: int
    session: int
    part: int

    def start(self, generation: int) -> int:
        number = self.session % _SESSIONS * PARTS + self.part
        return _BASE + generation % _GENERATIONS * _GENERATION + number * _PART

    def read(self, generation: int) -> tuple[int, bool, int] | None:
        """How many workers had the part in a generation, whether it was complete, and how many steps of that
        generation count; None if nothing is there."""
        found = os.pread(self.fd, _HEADER.size, self.start(generation))
        if len(found) < _HEADER.size:
            return None
        number, workers, is_complete, steps = _HEADER.unpack(found)
        return (workers, bool(is_complete), max(0, steps - 1)) if number == generation + 1 else None

    def begin(self, generation: int, workers: int) -> None:
        """A generation begins."""
        os.pwrite(self.fd, _HEADER.pack(generation + 1, workers, 0, 0), self.start(generation))

    def complete(self, generation: int) -> None:
        """The part has all that was before the generation."""
        os.pwrite(self.fd, struct.pack("q", 1), self.start(generation) + 16)

    def decide(self, generation: int, steps: int) -> None:
        """The generation is over, and so many of its steps count; all workers that are left say the same."""
        os.pwrite(self.fd, struct.pack("q", steps + 1), self.start(generation) + 24)


def forget(fd: int, before: int) -> None:
    """No worker needs the parts of the generations before any more."""
    for generation in range(max(0, before - _GENERATIONS + 1), before):
        start = _BASE + generation % _GENERATIONS * _GENERATION
        give_back(fd, start, start + _GENERATION)


class _PartMembers:
    """Workers that have a part; what they allocate for it lies where the part does."""

    def __init__(self, index: int, size: int, arena: Arena) -> None:
        self.index, self.size = index, size
        self._arena = arena

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor:
        return self._arena.tensor(length, dtype)

    def slots(self, count: int) -> Slots:
        return Slots(self._arena.fd, self._arena.reserve(slots.BYTES), count)


class PartTeam(_PartMembers):
    """Those of this generation."""

    def __init__(self, host: Host, arena: Arena) -> None:
        super().__init__(host.index, host.size, arena)
        self.progress, self.barrier = host.progress, host.barrier


class LeftTeam(_PartMembers):
    """In place of those of a generation that is over: one worker, which waits for no other."""

    def progress(self) -> StepCounter:
        counters = Counters(mmap.mmap(-1, Counters.bytes_needed(self.size)), lambda: None, 0)
        return StepCounter(counters, 0, self.size)

    def barrier(self) -> None:
        pass


class PartMemory(SharedMemory):
    """A part of a replica that several workers have, or one alone."""

    outlives = True
    team: PartTeam

    def __init__(self, host: Host, place: PartPlace, generation: int) -> None:
        super().__init__(host)
        self._place, self._generation = place, generation
        self._arena = Arena(place.fd, place.start(generation) + PAGE)
        self.team = PartTeam(host, self._arena)
        if self.leads:
            place.begin(generation, host.size)

    def common(self, length: int, dtype: torch.dtype) -> Tensor:
        return self._arena.tensor(length, dtype)

    def complete(self) -> None:
        """All workers that have the part have taken over what was before this generation."""
        self._host.barrier()
        self._place.complete(self._generation)

    def decide(self, steps: int, *, parts: int) -> None:
        for part in range(parts):
            replace(self._place, part=part).decide(self._generation, steps)

    def release(self) -> None:
        self._host.barrier()
        if self._params is not None:
            self._arena.keep_values(self._params)
        self._host.barrier()
        if self.leads:
            self._arena.give_back(self._arena.start, self._arena.used)


class LeftMemory(Memory):
    """What workers that are gone have left of a part, for the worker that takes it over."""

    is_shared = steps_together = outlives = True
    leads = fills = False
    team: LeftTeam

    def __init__(self, place: PartPlace, before: int) -> None:
        """The newest that is complete of the generations before."""
        for generation in range(before - 1, max(-1, before - 1 - _GENERATIONS), -1):
            found = place.read(generation)
            if found and found[1]:
                workers, _, self.steps = found
                break
        else:
            raise TornUpdate(
                f"no worker is left that has part {place.part} of the replica, and what is in memory is not complete; "
                "go on from the last checkpoint"
            )
        self.team = LeftTeam(0, workers, Arena(place.fd, place.start(generation) + PAGE))

    def common(self, length: int, dtype: torch.dtype) -> Tensor:
        return self.team.allocate(length, dtype)
