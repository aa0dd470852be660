"""Half the bits: 5 for the exponent, 10 for the fraction (IEEE 754; Horovod and DDP offer the same)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.comm.codecs.codec import Codec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Fp16(Codec):
    """16 bits an element: 3 digits, up to 65,504 (IEEE 754 half precision)."""

    keeps_error: ClassVar[bool] = False

    def size_bytes(self, length: int) -> int:
        return 2 * length

    def encode(self, values: Tensor, message: Tensor) -> None:
        import torch

        message.view(torch.float16).copy_(values)

    def decode(self, message: Tensor, values: Tensor) -> None:
        import torch

        values.copy_(message.view(torch.float16))
