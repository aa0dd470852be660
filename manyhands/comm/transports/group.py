"""Some workers of a host, meeting in its memory as if they were a host of their own."""

import torch
from torch import Tensor

from manyhands.comm.transports.host import Host, Progress


class Group:
    """This worker's place among the workers of its group; the host's workers form `groups` of equal size, in order.

    All workers of the host ask for the same things in the same order, as with `Host`; each group gets its own.
    """

    def __init__(self, host: Host, groups: int) -> None:
        self.size = host.size // groups
        self._host = host
        self._groups = groups
        self._group, self.index = divmod(host.index, self.size)

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor:
        # Memory that nobody touches takes no room.
        return [self._host.allocate(length, dtype) for _ in range(self._groups)][self._group]

    def progress(self) -> Progress:
        counters = [self._host.counters(self.size) for _ in range(self._groups)][self._group]
        return Progress(counters, self.index, self.size)
