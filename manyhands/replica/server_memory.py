"""Memory that someone else made for a replica, whose parameters are then updated elsewhere."""

from dataclasses import dataclass

from torch import Tensor

from manyhands.replica.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """Where the parameters are and where the gradients go; there is no optimizer state here."""

    layout: Layout
    params: Tensor
    grads: Tensor
    fills: bool
    """Whether this worker's first values go there; the others find them there."""
