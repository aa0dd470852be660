"""A pass of ours in the place of a module's own.

What a script puts on a module (hooks, of whatever kind, and whenever) lies around its pass, and so it sees whole values
there: what crosses between workers does so inside.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from manyhands.placement.absent import Lack
from manyhands.placement.function_transforms import refuse_transforms
from manyhands.placement.presence import Presence


class DividedPass:
    """A module that computes with what is here of its tensors, until it is removed; `used` are those tensors."""

    def __init__(self, module: nn.Module, used: Sequence[Tensor] = ()) -> None:
        self.module, self._used = module, used
        ids = {id(tensor) for tensor in used}
        self._places = [
            (tensors, name, tensor)
            for each in module.modules()
            for tensors in (each._parameters, each._buffers)
            for name, tensor in tensors.items()
            if id(tensor) in ids
        ]
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

    @property
    def is_lent(self) -> bool:
        """Whether other tensors are in the place of the module's own, as inside of `torch.func.functional_call`: those
        are whole, since a script makes whole ones of what it reads."""
        return any(tensors.get(name) is not tensor for tensors, name, tensor in self._places)

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
        # A pass that a script has put around this one calls it; or every worker computes the whole layer.
        if not self._is_on or self.is_lent:
            return type(self.module).forward(self.module, *args, **kwargs)
        refuse_transforms("tensor")
        self._presence.enter(self._own, self, (args, kwargs))
        try:
            return self.compute(*args, **kwargs)
        finally:
            self._presence.leave(self._own, self)
