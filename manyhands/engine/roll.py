"""Which sessions there are as a generation begins: every worker says what it has, before any session is entered."""

from dataclasses import dataclass
from enum import IntEnum

import msgspec

from manyhands.cluster.worker.world import World
from manyhands.errors import ManyhandsError


class Stage(IntEnum):
    """How far a worker has come with a session."""

    MADE = 0
    ENTERED = 1
    OVER = 2


class Told(msgspec.Struct, frozen=True, array_like=True):
    """One session, as one worker has it."""

    stage: int
    place: int  # which twin of the world it has
    commits: int


@dataclass(frozen=True)
class Roll:
    """The sessions that some workers have entered, in their order."""

    rows: list[Told]

    def has(self, number: int) -> bool:
        return number < len(self.rows)

    def is_over(self, number: int) -> bool:
        """Whether the workers have closed it: one that joins now skips it."""
        return self.has(number) and self.rows[number].stage == Stage.OVER


def call_roll(world: World, own: list[Told]) -> Roll:
    """All workers must ask, once in each generation that follows another."""
    said = [msgspec.json.decode(row, type=list[Told]) for row in world.gather(msgspec.json.encode(own))]
    rows = []
    for number in range(max(map(len, said))):
        told = [row[number] for row in said if len(row) > number and row[number].stage != Stage.MADE]
        if not told:
            break  # the workers that have made it will enter it together
        if len({one.stage for one in told}) > 1:
            raise ManyhandsError(
                f"a worker died while session {number + 1} was being closed, and some workers have closed it; "
                "go on from its last checkpoint (--resume, or session.resume in a script)"
            )
        rows.append(told[0])
    return Roll(rows)
