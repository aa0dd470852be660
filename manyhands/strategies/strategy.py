"""What every strategy is: a frozen dataclass that owns one step.

Strategies import no torch at run time: the launcher reads their settings and must start fast.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


class Strategy(Protocol):
    """How replicas agree: what a step does besides computing gradients.

    The dataclass is at once the configuration, the command-line grammar and the record in reports.
    """

    @property
    def synchronous(self) -> bool:
        """Whether a step equals one step of a single process on all workers' samples together."""

    @property
    def shares_replica(self) -> bool:
        """Whether the workers of a host may share one replica, so that `comm` connects hosts and not workers."""

    @property
    def topology(self) -> str:
        """How `comm` sums: `native`, or the name of a schedule."""

    def check(self, workers: int) -> None:
        """Refuse, before any process starts, what cannot run as asked."""

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        """One step on this worker's share of the samples; returns its loss."""
