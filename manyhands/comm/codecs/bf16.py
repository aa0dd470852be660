"""The upper half of a number: 8 bits for the exponent, 7 for the fraction (bfloat16; Kalamkar et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.comm.codecs.codec import Codec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Bf16(Codec):
    """16 bits an element: 2 digits, as far as 32 bits reach (bfloat16, Kalamkar et al. 2019)."""

    keeps_error: ClassVar[bool] = False

    def size_bytes(self, length: int) -> int:
        return 2 * length

    def encode(self, values: Tensor, message: Tensor) -> None:
        import torch

        message.view(torch.bfloat16).copy_(values)

    def decode(self, message: Tensor, values: Tensor) -> None:
        import torch

        values.copy_(message.view(torch.bfloat16))
