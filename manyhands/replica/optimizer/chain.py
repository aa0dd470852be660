"""Several optimizers that together train one model, each some of its parameters."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from manyhands.errors import UsageError


class Chain(Optimizer):
    """One optimizer whose step is that of several, one after the other; their groups are its groups."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        params = [param for group in groups for param in group["params"]]
        if len({id(param) for param in params}) < len(params):
            raise UsageError(
                f"the {len(optimizers)} optimizers have parameters in common; give each parameter to one of them"
            )
        super().__init__(groups, {})
        self.optimizers = list(optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for one, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            one.load_state_dict(state)
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


def one_of(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """What a script gives to a session, as one optimizer."""
    if not isinstance(optimizer, (list, tuple)):
        return optimizer  # type: ignore[return-value]
    if not optimizer:
        raise UsageError("the list of optimizers is empty; make one from model.parameters()")
    return optimizer[0] if len(optimizer) == 1 else Chain(optimizer)
