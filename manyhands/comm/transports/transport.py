"""What every transport does: move vectors between two ranks, in order, without blocking the caller.

Messages between a pair arrive in the order sent, and sender and receiver know their sizes. Everything posted makes
progress while its rank waits on any handle, so the order of waiting cannot cause a deadlock. A dead peer
raises `manyhands.errors.PeerLost`, when posting or when waiting.
"""

from typing import Protocol

from torch import Tensor


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the transfer is complete on this worker."""


class Transport(Protocol):
    """Point-to-point messages among `size` ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, peer: int, vector: Tensor) -> Handle:
        """Start to send a contiguous vector, which may not be changed until `wait` has returned."""

    def receive(self, peer: int, into: Tensor) -> Handle:
        """Start to fill a contiguous vector, which is complete once `wait` has returned."""
