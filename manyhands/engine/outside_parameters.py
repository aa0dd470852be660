"""Parameters that the loss depends on and no session trains: those of a criterion, of a discriminator.

A step leaves a gradient in them, from the samples of this worker alone. In one process a script may step them by an
optimizer of its own; of several workers each would train its own. So that optimizer is refused, when it steps.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from manyhands.errors import UsageError
from manyhands.replica.returned import leaves_of

_outside = WeakIdKeyDictionary()


def note(loss: Tensor, model: nn.Module) -> None:
    """Remember what the graph of a loss leads to beside the model."""
    own = {id(param) for param in model.parameters()}
    for leaf in leaves_of(loss):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            _outside[leaf] = True


def forget() -> None:
    """No session is open any more."""
    _outside.clear()


def refuse(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """An optimizer that is no session's steps these."""
    for param in params if len(_outside) else ():
        if param.grad is not None and param in _outside:
            raise UsageError(
                f"{type(optimizer).__name__} steps a parameter of the shape {tuple(param.shape)} that the session's "
                "loss uses and its model has not, so each worker would train its own; put it into the model, as "
                "torch.nn.ModuleList([model, criterion]), or train it by a session of its own"
            )
