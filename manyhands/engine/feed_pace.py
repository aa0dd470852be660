"""How far an epoch is, in rounds of the workers that the run began with: what a schedule goes by.

Workers that die or join change how many samples a step takes. A schedule was made for the steps of the first workers,
so it is told of those: ⌈samples in steps ÷ samples of a first round⌉ rounds, of which a step takes as many as the
script's own steps draw.
"""

from collections.abc import Sequence

from manyhands.data.ledger import Assignment


class FeedPace:
    """Of one stream. Rounds are counted once, also where a death makes steps again."""

    def __init__(self) -> None:
        self.counted = 0
        """Rounds of this epoch."""
        self.owed = 0
        """Of those, the last ones, which make no whole step yet."""
        self._assignment: Assignment | None = None
        self._before = 0  # places that were in steps when the assignment was made
        self._full = 1
        self._seen: Sequence[int] = ()  # by worker, rounds of the assignment
        self._stride = 1  # rounds that a step of the script draws

    def assign(self, assignment: Assignment, used: Sequence[int], *, before: int, full: int) -> None:
        """What is left of the epoch is assigned anew; `full` places make a round of the first workers."""
        self._assignment, self._seen = assignment, used
        self._before, self._full = before, full

    def begin(self) -> None:
        """The script begins the epoch, or goes on with batches of another size."""
        self.counted, self.owed = self._rounds(self._seen), 0

    def step(self, used_by: Sequence[int], worker: int | None = None) -> int:
        """A step is made, after which each worker has used so many rounds of the assignment; returns how many steps of
        the first workers that makes. `worker` is this one, where workers do not step together."""
        drawn = [now - before for now, before in zip(used_by, self._seen, strict=True)]
        strides = [one for one in (drawn if worker is None else drawn[worker : worker + 1]) if one > 0]
        if (
            not strides
        ):  # it is one of other data, or the second half of one whose first half a death came after
            return max(1, self.catch_up(used_by))
        self._seen, self._stride = used_by, min(strides)
        return self.catch_up(used_by)

    def as_far(self, used: int) -> list[int]:
        """By worker, so many rounds, as far as it gets them."""
        given = self._assignment
        return [min(used, given.rounds(worker)) for worker in range(len(given.held))] if given else []

    def catch_up(self, used_by: Sequence[int]) -> int:
        """The same between two steps of this worker."""
        rounds = self._rounds(used_by)
        self.owed += max(0, rounds - self.counted)
        self.counted = max(rounds, self.counted)
        steps, self.owed = divmod(self.owed, self._stride)
        if (
            self.owed
            and self._assignment
            and rounds == self._rounds_of(self._assignment.places + self._before)
        ):
            steps, self.owed = steps + 1, 0  # the last step of an epoch may take fewer
        return steps

    def _rounds(self, used_by: Sequence[int]) -> int:
        return self._rounds_of(self._before + (self._assignment.used(used_by) if self._assignment else 0))

    def _rounds_of(self, places: int) -> int:
        return -(-places // self._full)
