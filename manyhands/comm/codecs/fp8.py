"""8-bit numbers: 4 bits for the exponent, 3 for the fraction (E4M3, Micikevicius et al. 2022).

They reach from 2⁻⁹ to 448, so every message has one scale: its largest magnitude becomes 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.comm.codecs.codec import Codec, refuse

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 448.0
_SMALLEST_SCALE = (
    1e-35  # a smaller one has no inverse: such a vector is as good as zero, and stays with the sender
)


@dataclass(frozen=True, kw_only=True)
class Fp8(Codec):
    """8 bits an element: one digit, a scale for each message (FP8 E4M3, Micikevicius et al. 2022)."""

    def size_bytes(self, length: int) -> int:
        return 4 + length if length else 0

    def encode(self, values: Tensor, message: Tensor) -> None:
        import torch

        if not values.numel():
            return
        scale = values.abs().max() / _LARGEST
        if bool(scale < _SMALLEST_SCALE):
            scale = torch.zeros(())
        message[:4].view(torch.float32).copy_(scale)
        scaled = values / scale if bool(scale != 0) else torch.zeros_like(values)
        message[4:].view(torch.float8_e4m3fn).copy_(scaled)

    def decode(self, message: Tensor, values: Tensor) -> None:
        import torch

        if not values.numel():
            return
        scale = message[:4].view(torch.float32)
        if bool(scale < 0):
            raise refuse("fp8", "a negative scale")
        values.copy_(message[4:].view(torch.float8_e4m3fn)).mul_(scale)
