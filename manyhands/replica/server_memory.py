"""A replica whose parameters lie where servers read and update them."""

import torch
from torch import Tensor

from manyhands.comm.transports.arena import Arena
from manyhands.comm.transports.host import Host
from manyhands.replica.layout import Layout
from manyhands.replica.memory import Memory, SharedMemory


class ServerMemory(Memory):
    """The servers' vectors of parameters and gradients; the optimizer's state is with the servers."""

    is_served = True

    def __init__(
        self, layout: Layout, params: Tensor, grads: Tensor, fills: bool, host: Host | None, arena: Arena
    ) -> None:
        """`fills`: whether this worker's first values go there. Where the workers of a host share a cache of the
        parameters, it is in the memory of `host`. `arena` has the parameters, if other processes see them."""
        self._arena = arena
        self.layout = layout
        self.fills = fills
        self._params, self._grads = params, grads
        self._shared = SharedMemory(host) if host else Memory()
        self.leads, self.team = self._shared.leads, self._shared.team
        self.is_shared, self.steps_together = self._shared.is_shared, self._shared.steps_together

    def params(self, length: int, dtype: torch.dtype) -> Tensor:
        return self._params

    def gradients(self, length: int, dtype: torch.dtype) -> Tensor:
        return self._grads

    def common(self, length: int, dtype: torch.dtype) -> Tensor:
        return self.team.allocate(length, dtype)

    def require(self, vector_bytes: int, states: int) -> None:
        """The servers have seen to it."""

    def barrier(self) -> None:
        self._shared.barrier()

    def seal(self) -> None:
        self._shared.seal()

    def keep_values(self) -> None:
        self._arena.keep_values(self._params)

    def release(self) -> None:
        self._shared.release()
