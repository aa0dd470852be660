"""Refusals that several strategies share."""

from manyhands.errors import UsageError
from manyhands.strategies.interface import Asked


def at_least_one(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise UsageError(f"{name}={value}: it must be at least 1")


def within(lowest: float, highest: float, **settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not lowest <= value <= highest:
            raise UsageError(f"{name}={value:g}: it must be from {lowest:g} to {highest:g}")


def one_gradient_per_step(asked: Asked) -> None:
    """For strategies whose gradients come late, or whose steps are counted: a line search takes any number of them."""
    if asked.optimizer == "lbfgs":
        raise UsageError(
            "lbfgs evaluates the loss several times in a step, and this strategy gives one gradient per step; "
            "use another optimizer or --strategy all-reduce"
        )
