"""One worker, with no other to agree with: plain training, the baseline of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from manyhands.errors import UsageError
from manyhands.strategies.extras import LineSearch
from manyhands.strategies.interface import Asked, CommView, Share, Steps, Strategy, Traits


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """One worker, plain SGD and its relatives (Robbins & Monro 1951)."""

    traits: ClassVar[Traits] = Traits(steps=Steps.SYNCHRONOUS, replica="shared")

    def check(self, asked: Asked) -> None:
        if asked.workers != 1:
            raise UsageError(
                f"strategy single runs on 1 worker, not {asked.workers}; use --workers 1 or --strategy all-reduce"
            )

    def step(self, replica: LineSearch, comm: CommView, share: Share) -> float:
        if replica.needs_closure:
            return replica.minimize(lambda: replica.backward(share))
        loss = replica.backward(share)
        replica.apply()
        return loss
