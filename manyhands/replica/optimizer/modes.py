"""Optimizers that have other parameters for evaluation than for training, as schedule-free ones do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manyhands.replica.optimizer.twins import optimizers_in, settings_of


def has_modes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """While the parameters are those for evaluation; one that a script has set to evaluation stays there."""
    every = [optimizer] if has_modes(optimizer) else list(filter(has_modes, optimizers_in(optimizer)))
    were_training = []
    for one in every:
        before = _settings(one)
        one.eval()
        if _settings(one) != before:
            were_training.append(one)
    try:
        yield
    finally:
        for one in were_training:
            one.train()


def _settings(optimizer: Any) -> str:
    """Where it notes its mode."""
    held = {name: value for name, value in vars(optimizer).items() if isinstance(value, (bool, str))}
    return repr(([settings_of(group) for group in optimizer.param_groups], held))
