"""Which parameters got a gradient in a step, on any worker of the team."""

import torch
from torch import Tensor

from manyhands.replica.memory import Team


class UsedFlags:
    """Per worker and parameter a flag that it got none, in memory that all workers of the team see."""

    def __init__(self, count: int, team: Team) -> None:
        self.all_used = torch.ones(count, dtype=torch.uint8)
        self._index = team.index
        self._unused = team.allocate(team.size * count, torch.uint8).view(team.size, count)
        self.missing = team.allocate(team.size, torch.int64).numpy()  # how many got none

    def note(self, arrived: bytearray) -> None:
        """Of this worker, before it says that it has come to the gate."""
        self._unused[self._index].copy_(torch.frombuffer(arrived, dtype=torch.uint8) == 0)
        self.missing[self._index] = len(arrived) - sum(arrived)

    @property
    def any_used(self) -> Tensor:
        """Of all workers, behind the gate."""
        return 1 - self._unused.amin(0)
