"""What a script has put on the layers of a model, on any worker: all divide the model alike by it."""

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from manyhands.errors import UsageError
from manyhands.placement.process_groups import ProcessGroups

WATCHED, CHANGED = 1, 2


class Alterations:
    """Of each module, whether hooks see what it takes and gives, and whether it computes otherwise than its class."""

    def __init__(self, model: nn.Module, groups: ProcessGroups) -> None:
        self._own = bytes(
            WATCHED * is_watched(module) | CHANGED * _is_changed(module) for module in model.modules()
        )
        self._own = self._agreed(groups)
        self._of: Mapping[nn.Module, int] = dict(zip(model.modules(), self._own, strict=True))

    def watched(self, module: nn.Module) -> bool:
        return bool(self._of[module] & WATCHED)

    def changed(self, module: nn.Module) -> bool:
        return bool(self._of[module] & CHANGED)

    def move(self, groups: ProcessGroups) -> None:
        """Workers that come to another generation divide the model as those have that keep their parts."""
        if self._agreed(groups) != self._own:
            raise UsageError(
                "a new worker's script has put hooks on layers of the model that the others had not when their "
                "session began, so it would divide the model otherwise; put them on before mh.session, on all workers"
            )

    def _agreed(self, groups: ProcessGroups) -> bytes:
        total = bytes(len(self._own))
        for row in groups.world.gather(self._own):
            total = bytes(one | other for one, other in zip(total, row, strict=True))
        return total


def is_watched(module: nn.Module) -> bool:
    """Whether hooks of the script see what the module takes and gives, or the gradients of both."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def _is_changed(module: nn.Module) -> bool:
    """A pass of its own, parameters that are computed, or hooks on their gradients: what is made for whole parameters
    cannot be made of slices."""
    return (
        "forward" in vars(module)
        or hasattr(module, "parametrizations")
        or any(
            param is not None
            and bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))
            for param in module._parameters.values()
        )
    )
