"""A byte for each element (Dettmers 2016), with a scale for every 256 and error feedback (Karimireddy et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.comm.codecs.scaled import Scaled

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Int8(Scaled):
    """8.1 bits an element: whole numbers from -127 to 127, a scale for every 256 (Dettmers 2016)."""

    name: ClassVar[str] = "int8"
    levels: ClassVar[int] = 127

    def packed_bytes(self, length: int) -> int:
        return length

    def pack(self, whole: Tensor, into: Tensor) -> None:
        into.view(whole.dtype).copy_(whole)

    def unpack(self, packed: Tensor, length: int) -> Tensor:
        import torch

        return packed.view(torch.int8)
