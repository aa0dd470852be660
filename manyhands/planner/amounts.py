"""Seconds and rates: a number, or a vector with one number for each draw or each worker. The same code for all."""

from typing import Any

import numpy as np

Amount = Any


def later(one: Amount, other: Amount) -> Amount:
    """The larger of two, element by element."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return one if one > other else other
    return np.maximum(one, other)


def typical(amount: Amount) -> float:
    """One number for it."""
    return float(amount) if isinstance(amount, float | int) else float(np.mean(amount))
