"""Elastic averaging: every worker is tied to a common centre by a spring.

EASGD, Zhang, Choromanska & LeCun 2015, in its synchronous form; Theano-MPI has it. Every `period` steps, with x_i the
parameters of worker i and c the centre, all from their values before:

    x_i ← x_i − alpha · (x_i − c),    c ← c + alpha · Σ (x_j − c).

The paper keeps the centre on a server. Here every worker keeps it, and all add the same sum: the same bits.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.interface import CommView, Periodic, ReplicaView
from manyhands.strategies.refusals import within

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Spring:
    """What every worker keeps, the same everywhere."""

    centre: "Tensor"


@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(Periodic):
    """Workers explore, tied to a common centre by a spring (EASGD, Zhang et al. 2015; Theano-MPI)."""

    period: int = 4
    alpha: float | None = None  # how stiff; 0.9 / workers where not given, as in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, 1, alpha=self.alpha)

    def begin(self, replica: ReplicaView) -> Spring:
        return replica.keep(lambda: Spring(centre=replica.params.clone()))

    def meet(self, replica: ReplicaView, comm: CommView) -> None:
        alpha = 0.9 / comm.size if self.alpha is None else self.alpha
        centre = self.begin(replica).centre
        pull = (replica.params - centre).mul_(alpha)
        replica.params.sub_(pull)
        comm.sum_(pull)
        centre.add_(pull)

    def agree(self, replica: ReplicaView, comm: CommView) -> None:
        """The centre is what is evaluated, saved and gone on from."""
        super().agree(replica, comm)
        replica.params.copy_(self.begin(replica).centre)
