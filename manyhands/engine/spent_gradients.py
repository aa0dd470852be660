"""Gradients that a script looks for after a step, which has used them: one sentence says where they are to be seen."""

import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from manyhands.engine.asked_gradients import AskedGradients
from manyhands.engine.generation import Generation

_TORCH = os.path.dirname(torch.__file__) + os.sep  # `zero_grad` reads gradients, too


class SpentGradients:
    """Those of one session: watched from a step to its next call, until a script has looked."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_over = False
        self.watched: _AfterStep | None = None

    def begin(self, generation: Generation) -> None:
        """A step is made. A compiler that a script uses wants parameters of the classes that it has seen."""
        if not self._is_over and generation.is_whole and not _is_compiling():
            self.watched = _AfterStep(generation.replica.parameters, self._tell)

    def end(self) -> None:
        """The session's next call begins."""
        if self.watched is not None:
            self.watched.hide()
            self.watched = None

    def _tell(self) -> None:
        self._is_over = True
        self._say(
            "param.grad was read after session.step, which has used the gradients, so it is None; read them between "
            "session.backward(batch) and session.update()"
        )


class _AfterStep(AskedGradients):
    """The parameters between two calls."""

    def __init__(self, params: Sequence[nn.Parameter], tell: Callable[[], None]) -> None:
        super().__init__(params)
        self._tell = tell

    def asked(self, *, reads: bool) -> None:
        self.hide()
        if reads and not _reader().startswith(_TORCH):
            self._tell()


def _reader() -> str:
    """The file of the code that has asked: four calls further out."""
    return sys._getframe(4).f_code.co_filename


def _is_compiling() -> bool:
    """Whether PyTorch has compiled anything in this process."""
    known = sys.modules.get("torch._dynamo.utils")
    return known is not None and bool(known.counters.get("frames"))
