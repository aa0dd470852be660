"""Local SGD: workers train alone and average their parameters now and then.

McDonald, Hall & Mann 2010; Stich 2019. With x_i the parameters of worker i, every `period` steps  x_i ← Σ x_j / n.
"""

from dataclasses import dataclass

from manyhands.strategies.interface import CommView, Periodic, ReplicaView


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Periodic):
    """Workers train alone and average their parameters every `period` steps (McDonald et al. 2010; Stich 2019)."""

    def meet(self, replica: ReplicaView, comm: CommView) -> None:
        comm.mean_(replica.params)
