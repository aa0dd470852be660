"""A connection with one server, whatever carries it."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class Connection(Protocol):
    """Messages to a server, and its answers; vectors travel beside them, or lie in the host's memory."""

    @property
    def secret(self) -> bytes: ...

    def send(self, content: bytes, vector: Tensor | None = None) -> None: ...

    def take(self, *, wait: bool) -> tuple[bytes, Tensor | None] | None:
        """The next answer; without `wait`, None if there is none yet."""

    def fds(self) -> Iterator[int]: ...

    def close(self, *, linger: bool = True) -> None: ...
