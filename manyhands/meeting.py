"""What all workers say to each other before a step, or before something that is not a step."""

from collections.abc import Callable

from manyhands.errors import UsageError

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

    def __init__(self, answer: Callable[[], Rows], check: Callable[[Rows], None]) -> None:
        self._answer = answer
        self._check = check
        self._rows: Rows | None = None

    def _known(self) -> Rows:
        if self._rows is None:
            self._rows = self._answer()
            self._check(self._rows)
        return self._rows

    def total(self) -> float:
        """Samples of all workers together."""
        return sum(row[1] for row in self._known())

    def drawn(self) -> list[int]:
        """How many rounds of the data each worker has used, those of this step included."""
        return [int(row[3]) for row in self._known()]

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
