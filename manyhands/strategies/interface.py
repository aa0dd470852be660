"""The whole contract of a strategy: a frozen dataclass that owns one step, and whose fields are its settings.

A strategy uses two nouns: this worker's replica, and the comm to the other replicas, or the servers in its place.
`traits.py` has the facts that the engine reads, `extras.py` what only one or two strategies use. No strategy imports
torch at run time: the launcher reads their settings and must start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from manyhands.replica.share import Share
from manyhands.strategies.refusals import Asked, at_least_one, one_gradient_per_step
from manyhands.strategies.traits import Steps as Steps
from manyhands.strategies.traits import Traits

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Sums
    from manyhands.replica.layout import Span

R = TypeVar("R", bound="ReplicaView")
C = TypeVar("C", bound="CommView | ServersView")
V = TypeVar("V", bound="ServersView")
State = TypeVar("State")


class ReplicaView(Protocol):
    """This worker's replica: flat vectors over the model's real storage."""

    params: Tensor
    used: Tensor  # per parameter: whether it has a gradient in this step; `apply` skips the others
    steps: int  # backward passes so far

    @property
    def grads(self) -> Tensor: ...
    # Compute this worker's gradients, and return its loss; `on_ready` hears of each span that is complete.
    def backward(self, share: Share, on_ready: Callable[[Span], None] | None = None) -> float: ...
    # Run the user's optimizer on a span, or on all spans that this worker owns.
    def apply(self, span: Span | None = None) -> None: ...
    # The strategy's state: a dataclass of vectors and numbers, which checkpoints hold; `make` makes the first.
    def keep(self, make: Callable[[], State]) -> State: ...


class CommView(Protocol):
    """The other replicas. Every worker makes the same calls; vectors change in place."""

    rank: int
    size: int

    def sum_(self, vector: Tensor) -> None: ...
    def mean_(self, vector: Tensor) -> None: ...
    def sums(self, replica: Any) -> Sums: ...  # of gradients, span by span, during the backward pass
    def swap(self, peer: int, vector: Tensor) -> Tensor: ...  # a worker without a partner names itself


class ServersView(Protocol):
    """The servers that own the parameters."""

    def wait(self) -> None: ...  # until the parameters here are as fresh as the consistency wants them
    def begin(self, share: Share) -> Share: ...  # its backward pass waits until the last push is applied
    def push(self, span: Span) -> None: ...  # for `on_ready`
    def finish(self) -> None: ...  # all gradients of this step are pushed
    def settle(self) -> None: ...  # return when the servers have applied all that this worker has pushed
    def pull(self, *, whole: bool = True) -> None: ...  # if not whole: changed rows, into an unchanged copy
    def agree(self) -> None: ...  # return when all workers' pushes are applied, and the parameters are here


@dataclass(frozen=True, kw_only=True)
class Strategy(Generic[R, C]):
    """How replicas agree: what a step does besides computing gradients."""

    @property
    def traits(self) -> Traits:
        return Traits()

    @property
    def period(self) -> int:
        """Steps from one exchange between replicas to the next."""
        return 1

    def who_meets(self, steps: int, hosts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]] | None:
        """In the exchange after `steps` steps, the groups of replicas that learn from each other; None: all from
        all. `hosts` are the replicas of each host. What a replica learns alone in its group is not safe yet."""
        return None

    def check(self, asked: Asked) -> None:
        """Refuse, before any process starts, what cannot run as asked."""

    def step(self, replica: R, comm: C, share: Share) -> float:
        """Make one step on this worker's share of the samples, and return its loss."""
        raise NotImplementedError

    def agree(self, replica: R, comm: C) -> None:
        """Make the parameters of all replicas the same. All workers call it before an evaluation, before a
        checkpoint and at the end, if there were steps since the last time."""

    def regroup(self, replica: R, comm: C, *, is_new: bool) -> None:
        """Workers have come or gone, and what was in flight between them is lost; a worker that `is_new` has the
        state that another one kept."""


@dataclass(frozen=True, kw_only=True)
class Periodic(Strategy[R, C]):
    """Workers train alone for `period` steps, then `meet`; a pause ends the round early."""

    period: int = 8

    def __post_init__(self) -> None:
        at_least_one(period=self.period)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def begin(self, replica: R) -> object:
        """Before every step: keep, from the first one on, what `meet` will need."""

    def meet(self, replica: R, comm: C) -> None:
        """Make one set of parameters of those that the workers have."""
        raise NotImplementedError

    def step(self, replica: R, comm: C, share: Share) -> float:
        self.begin(replica)
        loss = replica.backward(share)
        replica.apply()
        if replica.steps % self.period == 0:
            self.meet(replica, comm)
        return loss

    def agree(self, replica: R, comm: C) -> None:
        if replica.steps % self.period:
            self.meet(replica, comm)


@dataclass(frozen=True, kw_only=True)
class Served(Strategy[R, V]):
    """Servers own the parameters and make the updates. What a worker keeps they do not have: it is not safe yet."""

    def leave(self, replica: R, servers: V) -> None:
        """Before this worker pauses, at its own time: push what it keeps."""

    def agree(self, replica: R, servers: V) -> None:
        servers.agree()
