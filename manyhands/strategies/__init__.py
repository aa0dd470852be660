"""How replicas agree. Adding a strategy is one file and one line in this table."""

from typing import Any

from manyhands import spec
from manyhands.strategies.all_reduce import AllReduce
from manyhands.strategies.single import Single
from manyhands.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Any]] = {
    "single": Single,
    "all-reduce": AllReduce,
}

DEFAULT = "all-reduce"


def parse(text: str) -> Strategy:
    """`all-reduce:topology=ring` → the strategy with its settings."""
    strategy: Strategy = spec.parse(text, STRATEGIES, "strategy")
    return strategy


def describe(strategy: Strategy) -> str:
    """The text that `parse` turns back into this strategy."""
    name = next(name for name, kind in STRATEGIES.items() if type(strategy) is kind)
    return spec.describe(strategy, name)
