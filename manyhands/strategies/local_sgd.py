"""Local SGD: workers train alone and average their parameters now and then.

McDonald, Hall & Mann 2010; Stich 2019. With x_i the parameters of worker i, every `period` steps  x_i ← Σ x_j / n.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.periodic import Periodic

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Periodic):
    """Workers train alone and average their parameters every `period` steps (McDonald et al. 2010; Stich 2019)."""

    def batches_per_update(self, workers: int, hosts: int = 1) -> int:
        """Averaging after every step is an update from all workers' batches; otherwise each is made from one."""
        return workers if self.period == 1 else 1

    def meet(self, replica: "Replica", comm: "Comm") -> None:
        comm.mean_(replica.params)
