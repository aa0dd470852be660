"""What all workers say to each other before a step, or before something that is not a step."""

import struct
from collections.abc import Callable

from torch.optim import Optimizer

from manyhands.cluster.world import World
from manyhands.errors import UsageError
from manyhands.placement.mesh import Mesh
from manyhands.replica.updates import hyper_parameters, set_hyper_parameters

# What a worker has come for.
STEP, END_OF_DATA, EVALUATE, SAVE, RESUME, FINISH = range(6)
WORDS = ("steps", "has reached the end of its data", "evaluates", "saves", "resumes", "finishes")

# What a worker asks all others to do with it, once the step is made; the later includes the earlier.
NOTHING, SAVE_NOW, LEAVE = range(3)

Rows = list[
    list[float]
]  # by rank: purpose, samples, digest of the settings, rounds used, change, what is asked for


class Meeting:
    """Everyone's purpose and samples; asking waits for the answer of the other hosts."""

    def __init__(
        self, answer: Callable[[], Rows], check: Callable[[Rows], None], mesh: Mesh, rank: int
    ) -> None:
        self._answer = answer
        self._check = check
        self._mesh = mesh
        self._rank = rank
        self._rows: Rows | None = None

    def _known(self) -> Rows:
        if self._rows is None:
            self._rows = self._answer()
            self._check(self._rows)
            if self._mesh.copies > 1:
                self._same_samples(self._rows)
        return self._rows

    def total(self) -> float:
        """Samples of all workers together; those that several workers compute together count once."""
        return sum(row[1] for row in self._known()[:: self._mesh.copies])

    def of_replica(self) -> float:
        """Samples of the workers of this replica."""
        members = self._mesh.members
        first = self._rank // members * members
        return sum(row[1] for row in self._known()[first : first + members : self._mesh.copies])

    def _same_samples(self, rows: Rows) -> None:
        for rank, row in enumerate(rows):
            lead = rank // self._mesh.copies * self._mesh.copies
            if row[:2] != rows[lead][:2]:
                raise UsageError(
                    f"workers {lead} and {rank} compute the same samples and were given "
                    f"{rows[lead][1]:g} and {row[1]:g}; "
                    "give workers of one replica the same batches"
                )

    def drawn(self) -> list[int]:
        """How many rounds of its data each worker has used, those of this step included; of those that have the same
        data, one is named."""
        return [int(row[3]) for row in self._known()[:: self._mesh.copies]]

    def change_is_wanted(self) -> bool:
        """Whether someone has heard that the members of the run are to change."""
        return any(row[4] for row in self._known())

    def asked(self) -> int:
        """The most that anyone asks for."""
        return int(max(row[5] for row in self._known()))

    def anyone_steps(self) -> bool:
        """Whether the others need us for a step."""
        return any(row[0] == STEP for row in self._known())

    def is_unanimous(self) -> bool:
        """Whether all have come for the same thing; where some have come because they ask for something, others need
        not have known, and all come again."""
        purposes = [int(row[0]) for row in self._known()]
        for rank, purpose in enumerate(purposes):
            if purpose != purposes[0] and self.asked() == NOTHING:
                raise UsageError(
                    f"the scripts have parted: worker 0 {WORDS[purposes[0]]} while worker {rank} {WORDS[purpose]}; "
                    "evaluate, save and leave loops at the same points on all workers"
                )
        return len(set(purposes)) == 1


def follow_settings(rows: Rows, optimizer: Optimizer, world: World) -> None:
    """Workers with data must agree on the optimizer's settings; one without follows them, since it may own spans."""
    lead = next((rank for rank, row in enumerate(rows) if row[0] == STEP), None)
    if lead is None or all(row[2] == rows[lead][2] for row in rows):
        return
    mine = hyper_parameters(optimizer)
    everyone = [
        struct.unpack(f"{len(mine)}d", payload)
        for payload in world.gather(struct.pack(f"{len(mine)}d", *mine))
    ]
    for rank, row in enumerate(rows):
        if row[0] == STEP and everyone[rank] != everyone[lead]:
            pair = next((a, b) for a, b in zip(everyone[lead], everyone[rank], strict=True) if a != b)
            raise UsageError(
                f"the optimizer's settings differ between workers: {pair[0]:g} on worker {lead}, {pair[1]:g} on "
                f"worker {rank}; step the scheduler equally often on all, or give it to mh.session(scheduler=…)"
            )
    set_hyper_parameters(optimizer, everyone[lead])
