"""What a step of a strategy is made of, as the price sees it: passes, vectors, exchanges, waits. No tensors."""

from dataclasses import dataclass
from typing import Literal

Scope = Literal["replicas", "host", "group"]
"""With which other replicas an exchange is: all of them, those of the host, or those of a group on it."""


@dataclass(frozen=True, slots=True)
class Start:
    """A sum over replicas, or a swap with one other, that goes on by itself."""

    number: int
    """By which the wait for it knows it; counts from the beginning of the step."""
    sent_bytes: float
    is_swap: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """Return when it is done; one that was seen to be done before has nothing to wait for."""

    number: int
    seen: bool = False


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over replicas that the worker waits for."""

    sent_bytes: float
    scope: Scope = "replicas"


@dataclass(frozen=True, slots=True)
class Swap:
    """A pair of replicas exchange vectors, and both wait."""

    sent_bytes: float


@dataclass(frozen=True, slots=True)
class Average:
    """A worker averages with the open replica of another one of its host, which need not wait."""

    vector_bytes: float


@dataclass(frozen=True, slots=True)
class PushSpan:
    """Gradients leave for their server."""

    sent_bytes: float


@dataclass(frozen=True, slots=True)
class Pushed:
    """All gradients of the step are pushed: under rules that gather, the step ends when all have its result."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Return when the servers have applied all that this worker has pushed."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """Return when the parameters are as fresh as the consistency wants them."""


@dataclass(frozen=True, slots=True)
class PullAll:
    """All parameters come from the servers."""

    received_bytes: float


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward and a backward pass; `inside` has what begins in it, each after a share of the pass."""

    inside: tuple[tuple[float, Start | PushSpan], ...] = ()
    share: float = 1.0
    """Of the worker's batch; a forward pass alone is about a third of it."""


@dataclass(frozen=True, slots=True)
class Touch:
    """Arithmetic on vectors: so many bytes are read and written."""

    touched_bytes: float


@dataclass(frozen=True, slots=True)
class Update:
    """The user's optimizer on so many bytes of parameters."""

    updated_bytes: float


@dataclass(frozen=True, slots=True)
class Meet:
    """The workers of a host, or all of them, wait for each other."""

    scope: Scope = "host"


Operation = (
    Start
    | Await
    | Sum
    | Swap
    | Average
    | PushSpan
    | Pushed
    | Settle
    | Fresh
    | PullAll
    | Pass
    | Touch
    | Update
    | Meet
)
StepOperations = tuple[Operation, ...]
