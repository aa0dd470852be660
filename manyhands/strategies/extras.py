"""What only one or two strategies use beyond the contract: each protocol says which, and what for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from manyhands.strategies.interface import CommView, ReplicaView, ServersView, Share

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Comm
    from manyhands.replica.neighbours import Neighbours
    from manyhands.replica.replica import Replica
    from manyhands.servers.worker.fleet import DirectFleet


Portion = tuple[Any, int]  # a batch, and how many samples are in it
Portions = list[Portion]


class LineSearch(ReplicaView, Protocol):
    """For `single` and `all-reduce`: an optimizer that evaluates the loss several times in a step."""

    needs_closure: bool

    def minimize(self, gradients: Callable[[], float]) -> float: ...


class Numbers(CommView, Protocol):
    """For `all-reduce` and `tournament`, and part of Coordinated: numbers, flags and copies beside vectors."""

    def sum_of(self, value: float) -> float: ...
    def any_(self, flags: Tensor) -> Tensor: ...
    def copy_(self, vector: Tensor, source: int = 0) -> None: ...
    def swap_numbers(self, peer: int, values: Sequence[float]) -> list[float]: ...


class BackgroundComm(CommView, Protocol):
    """For `double-buffer`, `hogwild` and `ad-psgd`: one sum or swap that goes on while the worker computes."""

    def start_sum(self, vector: Tensor) -> None: ...
    def sum_is_done(self) -> bool: ...
    def finish_sum(self) -> Tensor | None: ...
    def start_swap(self, peer: int, vector: Tensor) -> None: ...
    def swap_is_done(self) -> bool: ...
    def finish_swap(self) -> Tensor | None: ...
    def sum_of(self, value: float) -> float: ...
    def most_of(self, value: float) -> float: ...


class Grouped(CommView, Protocol):
    """For `hierarchical-local-sgd`: the comm of the worker's host or group."""

    def local(self, groups: int | None = None) -> CommView: ...


class HostReplica(ReplicaView, Protocol):
    """For `hogwild`: one worker speaks for the replica that the workers of a host share."""

    @property
    def leads(self) -> bool: ...


class OpenReplica(ReplicaView, Protocol):
    """For `ad-psgd`: the open replicas of the other workers of the host."""

    @property
    def neighbours(self) -> Neighbours: ...


class Candidate(ReplicaView, Protocol):
    """For `tournament`: the model as one vector, its loss on a share, and the optimizer as a trainer has it."""

    eval_batch: Share | None
    settings: list[float]

    @property
    def part(self) -> Any: ...
    def to_flat(self) -> Tensor: ...
    def load_flat(self, flat: Tensor) -> None: ...
    def score(self) -> float: ...
    def forget(self) -> None: ...
    def rate(self, factor: float) -> AbstractContextManager[None]: ...


class WithMomentum(ReplicaView, Protocol):
    """For `block-momentum`: the vectors of the user's optimizer."""

    @property
    def updates(self) -> Any: ...


class Descending(ReplicaView, Protocol):
    """For `downpour`: plain gradient descent on the worker's own copy."""

    def descend(self) -> None: ...


class DirectServers(ServersView, Protocol):
    """For `downpour`: push a gradient of the strategy's own, with a flag for each parameter."""

    def push_gradient(self, gradient: Tensor, used: Tensor) -> None: ...


class Coordinated(ServersView, Protocol):
    """For `sandblaster`: workers take portions of one batch, and worker 0 runs L-BFGS on the servers' vectors."""

    @property
    def comm(self) -> Numbers: ...
    def portions(self, share: Share, samples: int) -> Portions: ...
    def minimize(self, gradient: Callable[[], float]) -> float: ...
    def begin_evaluation(self, portions: int) -> None: ...
    def next_portion(self) -> int | None: ...
    def add_gradient(self) -> None: ...


if TYPE_CHECKING:  # the type checker sees here that the real ones offer all this

    def _replica(
        real: Replica,
    ) -> tuple[LineSearch, HostReplica, OpenReplica, Candidate, WithMomentum, Descending]:
        return real, real, real, real, real, real

    def _comm(real: Comm) -> tuple[Numbers, BackgroundComm, Grouped]:
        return real, real, real

    def _servers(real: DirectFleet) -> tuple[DirectServers, Coordinated]:
        return real, real
