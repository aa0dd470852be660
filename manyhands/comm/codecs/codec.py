"""What every codec does: turn a vector of gradients into a message of fewer bytes, and back.

How long a message is depends on the number of elements alone (and on the step, for codecs that warm up), so that a
receiver knows it. Codecs are for differences, as gradients are, and never for parameters. No codec imports torch when
it is imported: the launcher reads the settings and must start fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.errors import ManyhandsError

if TYPE_CHECKING:
    from torch import Tensor


class GarbledMessage(ManyhandsError):
    """A message that no encoder makes."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How a vector becomes fewer bytes; the fields are its settings."""

    keeps_error: ClassVar[bool] = True
    """Whether what a message leaves out is kept, and added to what is coded next."""
    is_sparse: ClassVar[bool] = False
    """Whether a message has some of the elements only."""

    is_low_rank: ClassVar[bool] = False
    """Whether it finds thin factors of the sum, and has no message for a vector."""

    def at(self, step: int) -> Codec:
        """The codec for the step that follows after so many."""
        return self

    def size_bytes(self, length: int) -> int:
        """Of the message for so many elements."""
        raise NotImplementedError

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write float32 `values` into a `message` of bytes."""
        raise NotImplementedError

    def decode(self, message: Tensor, values: Tensor) -> None:
        """The inverse; refuses what no encoder makes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NoCodec(Codec):
    """Gradients travel as they are, 32 bits each."""

    keeps_error: ClassVar[bool] = False

    def size_bytes(self, length: int) -> int:
        return 4 * length

    def encode(self, values: Tensor, message: Tensor) -> None:
        message.view(values.dtype).copy_(values)

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message.view(values.dtype))


def refuse(codec: str, what: str) -> GarbledMessage:
    return GarbledMessage(
        f"a {codec} message has {what}, which no encoder makes; the memory or the network of a host is faulty, or "
        "another process writes to it"
    )
