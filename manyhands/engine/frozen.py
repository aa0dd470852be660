"""Which parameters this worker's script has frozen: a step in which some workers train one and others do not is that
of no single process.

A frozen parameter has no gradient, so only where gradients are missing is a parameter asked.
"""

import operator
import zlib
from collections.abc import Sequence

from torch import nn

_is_trained = operator.attrgetter("requires_grad")


class Frozen:
    """What was frozen in the last step of this worker."""

    def __init__(self) -> None:
        self.sign = 0
        """The same where the same parameters are frozen."""
        self._params: Sequence[nn.Parameter] = ()
        self._places: Sequence[str] = ()
        self._arrived: Sequence[int] = ()
        self._missing: list[int] = []
        self._lacking: list[nn.Parameter] = []
        self._trained: list[bool] = []

    def enter(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        """A generation begins; without parameters nothing is compared."""
        self._params, self._places = params, names
        self.sign, self._arrived = 0, bytearray([1]) * len(params)
        self._missing, self._lacking, self._trained = [], [], []

    def note(self, arrived: Sequence[int]) -> None:
        """A step is made, in which these gradients have come."""
        if not self._params:
            return
        if arrived != self._arrived:
            self._arrived = bytearray(arrived)
            self._missing = [at for at, has in enumerate(arrived) if not has]
            self._lacking = [self._params[at] for at in self._missing]
            self._trained = []
        elif not self._missing:
            return
        trained = list(map(_is_trained, self._lacking))
        if trained != self._trained:
            self._trained = trained
            names = self.names()
            self.sign = zlib.crc32(repr(names).encode()) if names else 0
        elif not trained:
            self.sign = 0

    def names(self) -> list[str]:
        return [
            self._places[at]
            for at, is_trained in zip(self._missing, self._trained, strict=True)
            if not is_trained
        ]
