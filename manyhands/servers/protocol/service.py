"""What a strategy asks of the servers of a run."""

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.servers.protocol.consistency import Consistency


def _every_step(parameter: str) -> int:
    return 1


@dataclass(frozen=True, kw_only=True)
class Service:
    """How the servers serve; workers and servers of a run have the same."""

    rule: Consistency
    clip_norm: float | None = None
    every_of: Callable[[str], int] = _every_step
    """Steps from one push of a parameter's gradients to the next."""
    cached: bool = False
    """Whether the workers of a host share a replica, and one of them speaks with the servers for all."""
    copies: int = 0
    """How many servers on other hosts have a copy of what a server owns."""
