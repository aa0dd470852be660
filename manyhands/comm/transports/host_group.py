"""Some workers of a host, with counters and sums in its memory as if they were a host of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.comm.transports.counters import StepCounter
from manyhands.comm.transports.host import Host


class HostGroup:
    """This worker's place among the workers of its group; `groups` divide the host's workers, in order.

    All workers of the host ask for the same things in the same order, as with `Host`; each group gets its own. Groups
    may differ in size: every worker asks for as much as the largest of them needs (`most` workers).
    """

    def __init__(self, host: Host, groups: Sequence[Sequence[int]]) -> None:
        self._group = next(number for number, members in enumerate(groups) if host.index in members)
        self.index = groups[self._group].index(host.index)
        self.size = len(groups[self._group])
        self.most = max(len(members) for members in groups)
        self._host = host
        self._groups = len(groups)

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor:
        # Pages that no process touches take no memory.
        return [self._host.allocate(length, dtype) for _ in range(self._groups)][self._group]

    def progress(self) -> StepCounter:
        counters = [self._host.counters(self.most) for _ in range(self._groups)][self._group]
        return StepCounter(counters, self.index, self.size)
