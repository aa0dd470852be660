"""What local SGD and its relatives have in common: workers train alone for a round of steps, then meet."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


@dataclass(frozen=True, kw_only=True)
class Periodic(Strategy):
    """Workers train alone for `period` steps, then `meet`; a pause ends the round early."""

    period: int = 8

    def __post_init__(self) -> None:
        at_least_one(period=self.period)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def meets(self, steps: int) -> bool:
        return (steps + 1) % self.period == 0

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        self.begin(replica)
        loss = replica.backward(share)
        replica.apply()
        if replica.steps % self.period == 0:
            self.meet(replica, comm)
        return loss

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        if replica.steps % self.period:
            self.meet(replica, comm)

    def begin(self, replica: "Replica") -> None:
        """Before every step: what the meeting will need is kept from the first one on."""

    def meet(self, replica: "Replica", comm: "Comm") -> None:
        """Make one set of parameters of those that the workers have come to."""
        raise NotImplementedError
