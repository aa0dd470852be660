"""The memory of a part of a replica: it outlives the workers that have the part.

It lies in the memory that all processes of the host share, at a place that follows from the generation and the part.
So a worker that takes the place of a dead one finds there what the dead one had: parameters, optimizer state, the sum
of the gradients, the undo log. A header says whether the part was complete when its generation began, and, once the
generation is over, how many of its steps count.
"""

import mmap

import torch
from torch import Tensor

from manyhands.comm.transports import slots
from manyhands.comm.transports.arena import PAGE, Arena
from manyhands.comm.transports.counters import Counters, StepCounter
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.slots import Slots
from manyhands.replica.memory import Memory, SharedMemory
from manyhands.replica.part_place import PartPlace


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
            self._place.of(part).decide(self._generation, steps)

    def keep_values(self) -> None:
        if self._params is not None:
            self._arena.keep_values(self._params)

    def release(self) -> None:
        self._host.barrier()
        self.keep_values()
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
        generation, found = place.newest(before)
        self.steps = found.steps or 0
        self.team = LeftTeam(0, found.workers, Arena(place.fd, place.start(generation) + PAGE))

    def common(self, length: int, dtype: torch.dtype) -> Tensor:
        return self.team.allocate(length, dtype)
