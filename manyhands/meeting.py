"""What all workers say to each other before a step, or before something that is not a step."""

from collections.abc import Callable

from manyhands.errors import UsageError
from manyhands.placement.mesh import Mesh

# What a worker has come for.
STEP, END_OF_DATA, EVALUATE, SAVE, RESUME, FINISH = range(6)
WORDS = ("steps", "has reached the end of its data", "evaluates", "saves", "resumes", "finishes")

Rows = list[list[float]]  # by rank: purpose, samples, digest of the optimizer's settings


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

    def anyone_steps(self) -> bool:
        """Whether the others need us for a step; if nobody does, all must have come for the same thing."""
        purposes = [int(row[0]) for row in self._known()]
        if STEP in purposes:
            return True
        for rank, purpose in enumerate(purposes):
            if purpose != purposes[0]:
                raise UsageError(
                    f"the scripts have parted: worker 0 {WORDS[purposes[0]]} while worker {rank} {WORDS[purpose]}; "
                    "evaluate, save and leave loops at the same points on all workers"
                )
        return False
