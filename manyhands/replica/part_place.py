"""Where what belongs to a part of a replica lies in the memory of its host, whichever worker has the part."""

import os
import struct
from dataclasses import dataclass, replace

from manyhands.comm.transports.arena import give_back
from manyhands.errors import TornUpdate

_BASE = 1 << 60  # in the host's memory: above what generations hand out, below what servers do
_GENERATIONS = 32  # that have a place at the same time
_GENERATION = 1 << 54  # from one generation's parts to the next
_PART = 1 << 43
_SESSIONS, PARTS = 16, 128  # that have a place in a generation
# Generation + 1, workers that have the part, whether complete, steps or commits that count + 1.
_HEADER = struct.Struct("4q")


@dataclass(frozen=True)
class Found:
    """What the memory says of a part in a generation that is over."""

    workers: int
    """That had the part."""
    steps: int | None
    """That count; None if the workers that were left have not decided it."""


@dataclass(frozen=True)
class PartPlace:
    """Where a part of a replica of one session lies in the memory `fd`, by generation."""

    fd: int
    session: int
    part: int
    """Its number; where replicas may differ, that of this part of this replica."""

    def start(self, generation: int) -> int:
        number = self.session % _SESSIONS * PARTS + self.part
        return _BASE + generation % _GENERATIONS * _GENERATION + number * _PART

    def of(self, part: int) -> "PartPlace":
        """That of another part."""
        return replace(self, part=part)

    def newest(self, before: int) -> tuple[int, Found]:
        """The newest of the generations before that has the part complete, and what is known of it."""
        for generation in range(before - 1, max(-1, before - 1 - _GENERATIONS), -1):
            number, workers, is_complete, steps = self._read(generation)
            if number == generation + 1 and is_complete:
                return generation, Found(workers, steps - 1 if steps else None)
        raise TornUpdate(
            f"no worker is left that has part {self.part} of the replica, and what is in memory is not complete; "
            "go on from the last checkpoint"
        )

    def _read(self, generation: int) -> tuple[int, ...]:
        found = os.pread(self.fd, _HEADER.size, self.start(generation))
        return _HEADER.unpack(found) if len(found) == _HEADER.size else (0,) * 4

    def begin(self, generation: int, workers: int) -> None:
        """A generation begins."""
        os.pwrite(self.fd, _HEADER.pack(generation + 1, workers, 0, 0), self.start(generation))

    def complete(self, generation: int) -> None:
        """The part has all that was before the generation."""
        os.pwrite(self.fd, struct.pack("q", 1), self.start(generation) + 16)

    def decide(self, generation: int, steps: int) -> None:
        """The generation is over, and so many of its steps, or commits of the run, count; all workers that are left say
        the same. Where no worker has had the part in it, nothing is written."""
        if self._read(generation)[0] == generation + 1:
            os.pwrite(self.fd, struct.pack("q", steps + 1), self.start(generation) + 24)


def forget(fd: int, before: int) -> None:
    """No worker needs the parts of the generations before any more."""
    for generation in range(max(0, before - _GENERATIONS + 1), before):
        start = _BASE + generation % _GENERATIONS * _GENERATION
        give_back(fd, start, start + _GENERATION)
