"""What a strategy asks of the servers of a run."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from manyhands.servers.protocol.consistency import Consistency


@dataclass(frozen=True, kw_only=True)
class Service:
    """How the servers serve; workers and servers of a run have the same."""

    rule: Consistency
    clip_norm: float | None = None
    every: tuple[tuple[str, int], ...] = ()
    """Layers, and the steps from one push of their gradients to the next; other layers are pushed in every step."""
    cached: bool = False
    """Whether the workers of a host share a replica, and one of them speaks with the servers for all."""
    copies: int = 0
    """How many servers on other hosts have a copy of what a server owns."""
    elastic: bool = False
    """Whether the servers may be on several hosts that come and go."""

    def every_of(self, parameter: str) -> int:
        """Steps from one push of this parameter's gradients to the next."""
        return next((steps for layer, steps in self.every if is_in(layer, parameter)), 1)


def is_in(layer: str, parameter: str) -> bool:
    """Whether a parameter is, or is in, the layer of this name; `*` stands for anything."""
    return fnmatchcase(parameter, layer) or fnmatchcase(parameter, f"{layer}.*")
