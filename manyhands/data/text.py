"""A text file for language models: bytes are tokens, and the task is to say the next one."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyhands.data.request import Request
from manyhands.data.sets import Data, StoredSet
from manyhands.errors import DataError, UsageError
from manyhands.foreign.regular import open_regular

_HELD_OUT = 0.1
_VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    length: int = 64
    """Tokens in a sample."""


@dataclass(frozen=True, kw_only=True)
class WindowStore:
    """Windows side by side, so that an epoch asks for each token exactly once."""

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        places = indices.unsqueeze(1) * self.length + torch.arange(self.length + 1)
        windows = self.tokens[places].long()
        return windows[:, :-1], windows[:, 1:]


def load(request: Request, settings: TextSettings) -> Data:
    """The last tenth of the file is held out."""
    path = request.path("text:FILE")
    if settings.length < 1:
        raise UsageError(f"--data {request.text}: length must be at least 1")
    tokens = _mapped(path)
    end = len(tokens) - round(_HELD_OUT * len(tokens))
    train = WindowStore(tokens=tokens[:end], length=settings.length)
    test = WindowStore(tokens=tokens[end:], length=settings.length)
    if len(tokens) - end <= settings.length:
        raise DataError(
            f"{path} has {len(tokens)} bytes and its last tenth {len(tokens) - end}, too few for a window of "
            f"{settings.length} and the token after it; use a longer text or a smaller length"
        )
    return Data(
        name=request.text,
        train=StoredSet(train, seed=request.seed),
        test=StoredSet(test, seed=request.seed),
        shape=(settings.length,),
        classes=_VOCABULARY,
        task="next-token",
    )


def _mapped(path: Path) -> Tensor:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise DataError(f"{path} is empty")
            # Copy-on-write: torch asks for writable memory, and the pages stay shared between workers.
            return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
