"""Where a replica's vectors live: in this worker's own memory, or in the memory that the workers of a host share.

A replica on servers has a memory of the same kind (`server_memory.py`).
"""

from typing import Protocol

import torch
from torch import Tensor

from manyhands.comm.transports.arena import require_memory
from manyhands.comm.transports.counters import StepCounter
from manyhands.comm.transports.host import Host
from manyhands.errors import UsageError
from manyhands.replica.neighbours import Neighbours


class Team(Protocol):
    """The workers that add up their gradients, divide the updates, and end every step together."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor:
        """A zero-filled vector that all of them see."""

    def progress(self) -> StepCounter: ...

    def barrier(self) -> None: ...


class Alone:
    """A worker that makes its steps by itself."""

    index, size = 0, 1

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype)

    def progress(self) -> StepCounter:
        raise UsageError("a worker that is alone has no other worker to wait for")

    def barrier(self) -> None:
        pass


class Pool(Protocol):
    """Gives vectors, and takes them back: a comm, which sums its own vectors fastest."""

    def vector(self, length: int, dtype: torch.dtype) -> Tensor: ...

    def keep_values(self, vector: Tensor) -> None: ...

    def give_back(self, vector: Tensor) -> None: ...


class Memory:
    """What every kind of memory answers; as it stands, that of a worker that shares nothing."""

    leads = True
    """Whether this worker speaks for the replica where one must."""
    is_shared = False
    """Whether the workers of the host have the replica in common."""
    is_served = False
    """Whether servers have the parameters, and update them."""
    steps_together = False
    """Whether the workers that share the replica make every step together."""
    outlives = False
    """Whether another process can go on with it when all workers that have it are dead."""
    fills = True
    """Whether the first values of the parameters come from this worker's model."""
    gradients_here = 1
    """How many vectors of gradients the host has."""
    states_here = 1
    """How many copies of the optimizer's state the host has."""
    team: Team = Alone()

    def params(self, length: int, dtype: torch.dtype) -> Tensor:
        """The parameters' vector."""
        return self.common(length, dtype)

    def gradients(self, length: int, dtype: torch.dtype) -> Tensor:
        """The vector of this worker's gradients, or of the sum over its team."""
        return self.common(length, dtype)

    def state(self, length: int, dtype: torch.dtype) -> Tensor:
        """A vector of the optimizer's state."""
        return self.common(length, dtype)

    def common(self, length: int, dtype: torch.dtype) -> Tensor:
        """A vector of the replica's own, as that of frozen parameters."""
        raise NotImplementedError

    @property
    def neighbours(self) -> Neighbours:
        """The replicas of the other workers of the host, where they are open to each other."""
        raise UsageError("this strategy has not asked for an open replica")

    def require(self, vector_bytes: int, states: int) -> None:
        """Refuse a model that does not fit, with so many vectors of optimizer state."""
        if self.leads:
            vectors = 1 + self.gradients_here + self.states_here * states
            require_memory(vectors * vector_bytes, "parameters, gradients and optimizer state")

    def barrier(self) -> None:
        """Return when all workers that share the replica have come here."""

    def seal(self) -> None:
        """The replica has all its vectors."""

    def complete(self) -> None:
        """The replica has all that was before this generation."""

    def decide(self, steps: int, *, parts: int) -> None:
        """This generation is over, and so many of its steps count, in all parts of the replica."""

    def keep_values(self) -> None:
        """What still shows parameters, as a graph that the script is to go back through, is this worker's own now."""

    def release(self) -> None:
        """Give the vectors back."""


class PrivateMemory(Memory):
    """A replica of this worker's own, in ordinary memory or in what its comm sums fastest."""

    def __init__(self, device: torch.device, pool: Pool | None = None) -> None:
        self._device = device
        self._pool = pool
        self._borrowed: list[Tensor] = []
        self._params: Tensor | None = None

    def params(self, length: int, dtype: torch.dtype) -> Tensor:
        self._params = self.common(length, dtype)
        return self._params

    def common(self, length: int, dtype: torch.dtype) -> Tensor:
        if self._pool is None:
            return torch.zeros(length, dtype=dtype, device=self._device)
        self._borrowed.append(self._pool.vector(length, dtype))
        return self._borrowed[-1]

    def require(self, vector_bytes: int, states: int) -> None:
        if self._device.type == "cpu":
            super().require(vector_bytes, states)

    def keep_values(self) -> None:
        if self._pool is not None and self._params is not None:
            self._pool.keep_values(self._params)

    def release(self) -> None:
        self.keep_values()
        if self._pool is not None:
            for vector in self._borrowed:
                self._pool.give_back(vector)


class OpenMemory(PrivateMemory):
    """The same, with the parameters where the other workers of the host may read and change them."""

    def __init__(self, device: torch.device, pool: Pool | None, neighbours: Neighbours) -> None:
        super().__init__(device, pool)
        self._neighbours = neighbours

    @property
    def neighbours(self) -> Neighbours:
        return self._neighbours

    def params(self, length: int, dtype: torch.dtype) -> Tensor:
        return self._neighbours.claim(length, dtype)

    def release(self) -> None:
        super().release()
        self._neighbours.close()


class SharedMemory(Memory):
    """One replica that all workers of a host have in common, and update together."""

    is_shared = True
    steps_together = True

    def __init__(self, host: Host) -> None:
        self.leads = host.index == 0
        self._host = host
        self._from = self._to = host.arena.used
        self._params: Tensor | None = None
        if host.size > 1 and self.steps_together:
            self.team = host

    def params(self, length: int, dtype: torch.dtype) -> Tensor:
        self._params = self.common(length, dtype)
        return self._params

    def common(self, length: int, dtype: torch.dtype) -> Tensor:
        if self._host.size > 1:
            return self._host.allocate(length, dtype)
        return torch.zeros(length, dtype=dtype)

    def barrier(self) -> None:
        self._host.barrier()

    def seal(self) -> None:
        self._to = self._host.arena.used

    def keep_values(self) -> None:
        if self._host.size > 1 and self._params is not None:
            self._host.arena.keep_values(self._params)

    def release(self) -> None:
        self._host.barrier()
        if self._host.size == 1:
            return
        self.keep_values()
        self._host.barrier()
        if self.leads:
            self._host.arena.give_back(self._from, self._to)


class LockFreeMemory(SharedMemory):
    """One replica that each worker of the host updates by itself, with gradients and optimizer state of its own.

    The parameters are all that workers may change at the same moment. State that several workers wrote would be torn:
    where one worker's first moment of an element meets another's older second moment, which may be zero, Adam divides
    by nothing.
    """

    steps_together = False

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.gradients_here = self.states_here = host.size

    def gradients(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype)

    def state(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype)
