"""Local SGD on two levels: averages inside a group often, between all workers less often.

Cong & Bhardwaj's hierarchical bulk-synchronous training; Lin et al. 2020 (hierarchical local SGD). Messages inside a
host are cheap and those between hosts are not, so neighbours meet every `local_period` steps and all workers every
`global_period` steps.

Any number of workers forms groups: they differ by at most one worker, and there are never more
groups than workers. When a worker dies, those who are left form the groups anew. A worker that is
alone in its group trains by itself until all meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.comm.grouping import grouped
from manyhands.errors import UsageError
from manyhands.strategies.extras import Grouped
from manyhands.strategies.interface import Asked, ReplicaView, Share, Strategy
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step


@dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(Strategy):
    """Average inside a host often, between hosts less often (Cong & Bhardwaj; Lin et al. 2020)."""

    local_period: int = 2
    global_period: int = 8
    groups: int | None = None  # as even as possible, each inside a host; one per host where not given

    def __post_init__(self) -> None:
        at_least_one(local_period=self.local_period, global_period=self.global_period, groups=self.groups)
        if self.global_period % self.local_period:
            raise UsageError(
                f"global_period={self.global_period} is not a multiple of local_period={self.local_period}; "
                "all workers meet where the groups meet"
            )

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)
        # Before the workers have met; a run that has lost some of them goes on with fewer groups.
        if self.groups and asked.hosts is None and asked.workers < self.groups:
            raise UsageError(
                f"{asked.workers} workers cannot form {self.groups} groups; "
                f"use --workers {self.groups}, or fewer groups="
            )

    @property
    def period(self) -> int:
        return self.local_period

    def who_meets(self, steps: int, hosts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]] | None:
        if (steps + 1) % self.global_period == 0:
            return None
        everyone = sum(map(len, hosts))
        return [group for host in hosts for group in grouped(host, everyone, self.groups)]

    def step(self, replica: ReplicaView, comm: Grouped, share: Share) -> float:
        loss = replica.backward(share)
        replica.apply()
        if replica.steps % self.global_period == 0:
            comm.mean_(replica.params)
        elif replica.steps % self.local_period == 0:
            comm.local(self.groups).mean_(replica.params)
        return loss

    def agree(self, replica: ReplicaView, comm: Grouped) -> None:
        if replica.steps % self.global_period:
            comm.mean_(replica.params)
