"""One bit for each element: whether it is negative (1-bit SGD, Seide et al. 2014, as CNTK has it).

For every block the message has two means: m⁺ of the elements that are not negative, m⁻ of the others. An element is
decoded as the mean of its side, the value with the least squared error, and

    e ← v − decoded,      v ← gradient + e  in the next step

so that what a step leaves out comes in later ones; without that memory the codec does not converge. Zero has no bit of
its own: in a block of zeros both means are 0, and it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.comm.codecs.codec import Codec, refuse
from manyhands.comm.codecs.even_blocks import block_count, in_blocks
from manyhands.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OneBit(Codec):
    """1.02 bits an element: its sign, two means for every block, error feedback (1-bit SGD, Seide et al. 2014)."""

    block: int = 4096

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise UsageError(f"block={self.block}: it must be a multiple of 8, since bits travel in bytes")

    def size_bytes(self, length: int) -> int:
        return 8 * block_count(length, self.block) + (length + 7) // 8

    def encode(self, values: Tensor, message: Tensor) -> None:
        import numpy as np
        import torch

        means, bits = self._means(message, values.numel())
        above = values >= 0
        for rows, numbers in in_blocks(values, self.block):
            begin = rows.start * self.block
            count = above[begin : begin + numbers.numel()].view_as(numbers).sum(1)
            means[rows, 0] = numbers.clamp(min=0).sum(1) / count.clamp(min=1)
            means[rows, 1] = numbers.clamp(max=0).sum(1) / (numbers.shape[1] - count).clamp(min=1)
        bits.copy_(torch.from_numpy(np.packbits(above.numpy())))

    def decode(self, message: Tensor, values: Tensor) -> None:
        import numpy as np
        import torch

        means, bits = self._means(message, values.numel())
        if bool((means[:, 0] < 0).any()) or bool((means[:, 1] > 0).any()):
            raise refuse("one-bit", "a mean on the wrong side of zero")
        found = np.unpackbits(bits.numpy())
        if found[values.numel() :].any():
            raise refuse("one-bit", "an element too many")
        above = torch.from_numpy(found)[: values.numel()].view(torch.bool)
        for rows, numbers in in_blocks(values, self.block):
            begin = rows.start * self.block
            sides = above[begin : begin + numbers.numel()].view_as(numbers)
            torch.where(sides, means[rows, :1], means[rows, 1:], out=numbers)

    def _means(self, message: Tensor, length: int) -> tuple[Tensor, Tensor]:
        import torch

        size = 8 * block_count(length, self.block)
        return message[:size].view(torch.float32).view(-1, 2), message[size:]
