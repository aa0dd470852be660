"""Who limits the norm of the gradients that workers push.

Without gathering, each worker clips its own gradient before it pushes any of it. Of gathered gradients each server
knows the norm of its groups: they tell one of the workers, which puts them together while it waits.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.replica.layout import Layout
from manyhands.replica.optimizer.clipped_path import clip_factor, norm_of
from manyhands.servers.protocol.messages import ScaleGradients
from manyhands.servers.worker.server_connections import ServerConnections


class Unclipped:
    """No limit, or one that the servers ask a worker to compute."""

    needs_all = False
    """Whether no group may be pushed before the whole gradient is there."""
    clip_norm: float | None = None

    def clip(self, grads: Tensor, used: Sequence[int]) -> None:
        pass


class ClippedAlone(Unclipped):
    """Each worker clips its own gradient."""

    needs_all = True

    def __init__(self, clip_norm: float, layout: Layout) -> None:
        self.clip_norm = self._limit = clip_norm
        self._layout = layout

    def clip(self, grads: Tensor, used: Sequence[int]) -> None:
        """As `clip_grad_norm_` does, in the model's order: the same bits."""
        places = zip(self._layout.places, used, strict=True)
        norms = [
            torch.linalg.vector_norm(grads[place.start : place.stop])
            for place, is_used in reversed(list(places))
            if is_used
        ]
        if norms:
            grads.mul_(clip_factor(self._limit, norm_of(norms)))


class ClippedTogether(Unclipped):
    """The servers clip what they have gathered."""

    def __init__(self, clip_norm: float, connections: ServerConnections) -> None:
        self.clip_norm = self._limit = clip_norm
        self._connections = connections
        connections.on_norms = self._scale

    def _scale(self) -> None:
        """One server has told this worker a norm, so all will."""
        connections = self._connections
        owners = connections.owners_in_flight()
        for server in owners:
            while server not in connections.norms:
                connections.hear(server)
        norm = math.sqrt(sum(connections.norms[server] for server in owners))
        connections.norms.clear()
        factor = clip_factor(self._limit, norm)
        for server in owners:
            connections.send(server, ScaleGradients(number=next(connections.numbers), factor=factor))
