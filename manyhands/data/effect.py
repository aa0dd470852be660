"""Which replica has the effect of which samples, where replicas do not learn from all others at once.

A sample that a step has used is in the parameters of one replica, and gets into others when replicas
meet. Every worker knows which replicas meet, so each keeps these books for all, without a message. When
workers die, what the surviving replicas have is what counts: a sample whose effect died with them is
assigned again. The ledger is not asked.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.data.ledger import Assignment

Learners = Sequence[Sequence[int]]  # workers that learn from each other


class Effects:
    """Of one assignment, by worker: what its replica had before, and how many rounds of every worker it has since."""

    def __init__(self, before: Sequence[Tensor]) -> None:
        """`before` are places, as flags, that each worker's replica has the effect of."""
        workers = range(len(before))
        self._before = before
        self._shown = [{worker} for worker in workers]  # by worker: whose `before` it has
        self._rounds = [[0 for _ in workers] for _ in workers]
        self._everywhere: Sequence[int] = [0 for _ in workers]  # rounds that all have
        self._all_have_met = False
        self.differ = any(one is not before[0] for one in before)

    def meet(self, used: Sequence[int], groups: Learners | None = None) -> None:
        """Replicas have learned from each other, all or in groups; each worker had used so many rounds."""
        if groups is None:
            self._everywhere, self._all_have_met = used, True
            return
        self.differ = True
        for group in groups:
            for worker in group:
                self._rounds[worker][worker] = used[worker]
            rounds = [max(column) for column in zip(*(self._rounds[worker] for worker in group), strict=True)]
            shown = set().union(*(self._shown[worker] for worker in group))
            for worker in group:
                self._rounds[worker], self._shown[worker] = list(rounds), shown

    def of(self, worker: int, used: int, assignment: Assignment) -> Tensor:
        """The places, as flags, whose effect a worker's replica has; it has used so many rounds itself."""
        found = torch.zeros_like(self._before[worker])
        for other, before in enumerate(self._before):
            if self._all_have_met or other in self._shown[worker]:
                found |= before
        for other, rounds in enumerate(self._rounds[worker]):
            own = used if other == worker else 0
            for number in range(max(rounds, self._everywhere[other], own)):
                found[assignment.share(number, other)] = True
        return found
