"""Two elements in a byte (QSGD, Alistarh et al. 2017), rounded to the nearest, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.comm.codecs.codec import refuse
from manyhands.comm.codecs.scaled import Scaled

if TYPE_CHECKING:
    from torch import Tensor

_ZERO = 8  # what stands for 0: the four bits go from 1 to 15


@dataclass(frozen=True, kw_only=True)
class Int4(Scaled):
    """4.1 bits an element: whole numbers from -7 to 7, a scale for every 256 (QSGD, Alistarh et al. 2017)."""

    name: ClassVar[str] = "int4"
    levels: ClassVar[int] = 7

    def packed_bytes(self, length: int) -> int:
        return (length + 1) // 2

    def pack(self, whole: Tensor, into: Tensor) -> None:
        import torch

        bits = (whole + _ZERO).view(torch.uint8)
        half = whole.numel() // 2
        torch.bitwise_or(bits[: 2 * half : 2], bits[1 : 2 * half : 2] << 4, out=into[:half])
        if whole.numel() % 2:
            into[half] = bits[-1] | _ZERO << 4

    def unpack(self, packed: Tensor, length: int) -> Tensor:
        import torch

        bits = torch.stack([packed & 15, packed >> 4], dim=1).view(-1)
        if length % 2 and int(bits[-1]) != _ZERO:
            raise refuse(self.name, "an element too many")
        return bits[:length].view(torch.int8) - _ZERO
