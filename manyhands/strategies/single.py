"""One worker, nobody to agree with: plain training, the baseline of every comparison."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.errors import UsageError
from manyhands.strategies.interface import Asked, Strategy

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """One worker, plain SGD and its relatives (Robbins & Monro 1951)."""

    synchronous: ClassVar[bool] = True
    shares_replica: ClassVar[bool] = True

    def check(self, asked: Asked) -> None:
        if asked.workers != 1:
            raise UsageError(
                f"strategy single runs on 1 worker, not {asked.workers}; use --workers 1 or --strategy all-reduce"
            )

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        if replica.needs_closure:
            return replica.minimize(lambda: replica.backward(share))
        loss = replica.backward(share)
        replica.apply()
        return loss
