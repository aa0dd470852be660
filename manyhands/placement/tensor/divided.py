"""A pass of ours in the place of a module's own.

What a script puts on a module (hooks, of whatever kind, and whenever) lies around its pass, and so it sees whole values
there: what crosses between workers does so inside.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from manyhands.placement.absent import Lack
from manyhands.placement.presence import Presence


class DividedPass:
    """A module that computes with what is here of its tensors, until it is removed; `used` are those tensors."""

    def __init__(self, module: nn.Module, used: Sequence[Tensor] = ()) -> None:
        self.module, self._used = module, used
        self._own: list[Lack] = []
        self._presence: Presence
        self._is_on = False
        self.attach()

    def bind(self, presence: Presence) -> None:
        """The tensors are absent from here on, but for this pass."""
        self._presence = presence
        self._own = [presence.lacks[id(tensor)] for tensor in self._used]

    @property
    def is_first(self) -> bool:
        """Whether the module's pass is this one, and not one that a script has put around it."""
        return getattr(self.module.__dict__.get("forward"), "__self__", None) is self

    def attach(self) -> None:
        self._is_on = True
        self.module.__dict__.setdefault("forward", self._run)

    def remove(self) -> None:
        self._is_on = False
        if self.is_first:
            del self.module.__dict__["forward"]

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own `forward`."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_on:  # a pass that a script has put around this one calls it
            return type(self.module).forward(self.module, *args, **kwargs)
        self._presence.enter(self._own, self, (args, kwargs))
        try:
            return self.compute(*args, **kwargs)
        finally:
            self._presence.leave(self._own, self)
