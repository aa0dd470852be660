"""SGD on a span, in passes of which every one can be made again.

An optimizer that changes parameters and momentum in place leaves a mixture behind if its process dies in the middle.
Here each pass writes to one place what it reads from others, and says so first:

    scratch   <-  gradient + keep * momentum
    momentum  <-  scratch                           MOMENTUM
    scratch   <-  params - rate * momentum          SCRATCH
    params    <-  scratch                           PARAMS

A survivor that knows which of them was going on makes it again, and then the rest. (The third finds the momentum in the
scratch, where it has just been made, unless it is made again.) The scratch is one span of memory that all workers of
the host see, used for every span in turn, so that it stays in the cache: nothing else is copied, and nothing is kept of
what was before. The gradient may itself be in the scratch, if it can be made again. Without momentum the first and the
third pass are one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOMENTUM, SCRATCH, PARAMS = 1, 2, 3

Note = Callable[[int], None]

_OTHERWISE = ("nesterov", "dampening", "maximize", "foreach", "fused", "differentiable")


def is_simple(settings: Mapping[str, Any]) -> bool:
    """Whether a group of `torch.optim.SGD` is nothing but rate, momentum and weight decay."""
    return not any(settings.get(name) for name in _OTHERWISE) and not isinstance(settings["lr"], Tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Descent:
    """One step of SGD on one span of the flat vector; nothing lies behind `params` in it."""

    params: Tensor
    momentum: Tensor | None
    rate: float
    keep: float  # how much of the momentum
    decay: float

    def make(self, gradient: Tensor, scratch: Tensor, note: Note) -> None:
        """The whole step; `note` is told of each pass before it begins. Changes `gradient` only if it is `scratch`."""
        with torch.no_grad():
            gradient = self._decayed(gradient, scratch)
            if self.momentum is not None:
                torch.add(gradient, self.momentum, alpha=self.keep, out=scratch)
                self.go_on(MOMENTUM, scratch, note)
            else:
                torch.add(self.params, gradient, alpha=-self.rate, out=scratch)
                self.go_on(PARAMS, scratch, note)

    def go_on(self, stage: int, scratch: Tensor, note: Note) -> None:
        """The rest of a step, from the pass that was last noted."""
        with torch.no_grad():
            if self.momentum is not None:
                momentum = self.momentum
                if stage == MOMENTUM:
                    note(MOMENTUM)
                    self.momentum.copy_(scratch)
                    momentum = scratch  # in the cache
                if stage <= SCRATCH:
                    note(SCRATCH)
                    torch.add(self.params, momentum, alpha=-self.rate, out=scratch)
            note(PARAMS)
            self.params.copy_(scratch)

    def make_in_place(self, gradient: Tensor) -> None:
        """The same to the last bit, where no survivor could go on anyway."""
        with torch.no_grad():
            gradient = self._decayed(gradient, None)
            if self.momentum is not None:
                gradient = torch.add(gradient, self.momentum, alpha=self.keep, out=self.momentum)
            self.params.add_(gradient, alpha=-self.rate)

    def _decayed(self, gradient: Tensor, into: Tensor | None) -> Tensor:
        gradient = gradient[: len(self.params)]
        return torch.add(gradient, self.params, alpha=self.decay, out=into) if self.decay else gradient


def descent_of(settings: Mapping[str, Any], params: Tensor, momentum: Tensor | None) -> Descent | None:
    """A step of a group of `torch.optim.SGD`, if its settings are simple."""
    if not is_simple(settings):
        return None
    return Descent(
        params=params,
        momentum=momentum,
        rate=settings["lr"],
        keep=settings["momentum"],
        decay=settings["weight_decay"],
    )
