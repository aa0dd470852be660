"""Whole numbers, and for every block of elements a scale: what `int8` and `int4` have in common.

With m the largest magnitude of a block and L levels on either side,  s = m / L,  q = round(v / s),  v' = q s.  A block
of zeros has the scale 0, and is exact. What rounding leaves out is kept by the sender, |v − v'| ≤ s / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.comm.codecs.codec import Codec, refuse
from manyhands.comm.codecs.even_blocks import block_count, in_blocks

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST = (
    1e-37  # a scale below it has no inverse: such a block is as good as zero, and stays with the sender
)


@dataclass(frozen=True, kw_only=True)
class Scaled(Codec):
    """Whole numbers with a scale for every `block`."""

    name: ClassVar[str]
    levels: ClassVar[int]
    block: ClassVar[int] = 256

    def encode(self, values: Tensor, message: Tensor) -> None:
        import torch

        scales, rest = self._scales(message, values.numel())
        whole = torch.empty(values.numel(), dtype=torch.int8)
        for rows, numbers in in_blocks(values, self.block):
            scale = scales[rows]
            torch.mul(numbers.abs().amax(1), 1 / self.levels, out=scale)
            scale.masked_fill_(scale < _SMALLEST, 0.0)
            inverse = torch.where(scale == 0, scale, 1 / scale).unsqueeze(1)
            begin = rows.start * self.block
            whole[begin : begin + numbers.numel()].view_as(numbers).copy_((numbers * inverse).round_())
        self.pack(whole, rest)

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, rest = self._scales(message, values.numel())
        if bool((scales < 0).any()):
            raise refuse(self.name, "a negative scale")
        whole = self.unpack(rest, values.numel())
        if values.numel() and int(whole.min()) < -self.levels:
            raise refuse(self.name, f"a number below -{self.levels}")
        values.copy_(whole)
        for rows, numbers in in_blocks(values, self.block):
            numbers.mul_(scales[rows].unsqueeze(1))

    def _scales(self, message: Tensor, length: int) -> tuple[Tensor, Tensor]:
        import torch

        size = 4 * block_count(length, self.block)
        return message[:size].view(torch.float32), message[size:]

    def size_bytes(self, length: int) -> int:
        return 4 * block_count(length, self.block) + self.packed_bytes(length)

    def packed_bytes(self, length: int) -> int:
        raise NotImplementedError

    def pack(self, whole: Tensor, into: Tensor) -> None:
        raise NotImplementedError

    def unpack(self, packed: Tensor, length: int) -> Tensor:
        raise NotImplementedError
