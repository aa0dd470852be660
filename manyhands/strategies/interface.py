"""What every strategy is: a frozen dataclass that owns one step.

Strategies import no torch at run time: the launcher reads their settings and must start fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.servers.protocol.consistency import Consistency

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run is asked to be, as far as a strategy may have to refuse it."""

    workers: int
    servers: int = 0
    optimizer: str | None = None  # its name in small letters; None where nobody knows it yet
    hosts: int | None = None  # None until the workers have met


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How replicas agree: what a step does besides computing gradients.

    The dataclass is at once the configuration, the command-line grammar and the record in reports. A strategy
    overrides a property by a field or a class variable of the same name.
    """

    @property
    def synchronous(self) -> bool:
        """Whether a step equals one step of a single process on all workers' samples together."""
        return False

    @property
    def pooled(self) -> bool:
        """Whether gradients are weighted by the samples of all workers in the step, so that their sum is the
        gradient of the mean over all samples; otherwise by the worker's own."""
        return self.synchronous

    @property
    def shares_replica(self) -> bool:
        """Whether the workers of a host may share one replica, so that `comm` connects hosts and not workers."""
        return False

    @property
    def open_replica(self) -> bool:
        """Whether a worker's replica lies where the other workers of its host can read and write it."""
        return False

    @property
    def topology(self) -> str:
        """How `comm` sums: `native`, or the name of a schedule."""
        return "native"

    @property
    def lockstep(self) -> bool:
        """Whether all workers take every step together; if not, nobody waits for anybody at a step."""
        return True

    def meets(self, steps: int) -> bool:
        """Whether replicas exchange what they have learned in the step that follows after so many.

        What a worker has used since is safe then: some state that has it survives the loss of any one worker. In other
        steps workers with replicas of their own need nobody.
        """
        return True

    def who_meets(self, steps: int, hosts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]] | None:
        """In such a step, which replicas learn from each other, in groups; None: all from all.

        `hosts` are the replicas of each host. What a replica that is alone in its group has used is not safe yet.
        """
        return None

    def holds_back(self, replica: "Replica", comm: "Comm") -> bool:
        """Whether, after a step, this worker alone has something of what it has learned: then what it has used is not
        safe yet."""
        return False

    @property
    def late(self) -> bool:
        """Whether a step makes safe only what was used before it, since its own gradients are still under way when it
        ends, or were made after the replicas have met. What it has used itself waits for the next meeting, or until all
        agree."""
        return False

    @property
    def repeatable(self) -> bool:
        """Whether the same plan gives the same parameters again, to the bit."""
        return self.lockstep

    @property
    def same_settings(self) -> bool:
        """Whether the optimizers of all workers must have the same settings."""
        return True

    @property
    def period(self) -> int:
        """Steps from one time that replicas agree to the next."""
        return 1

    def batches_per_update(self, workers: int, hosts: int = 1) -> int:
        """How many workers' batches go into one update, which the learning rate is to fit (`fairness.py`)."""
        return workers if self.pooled else 1

    def updates_late(self, workers: int, hosts: int = 1) -> int:
        """How many updates of others usually come between a gradient and its own update (`fairness.py`)."""
        return 0

    @property
    def rule(self) -> Consistency | None:
        """By which rule servers apply what workers push; None: the strategy uses no servers."""
        return None

    @property
    def serves_hosts(self) -> bool:
        """Whether its servers may be on several hosts that come and go."""
        return False

    @property
    def copies(self) -> int:
        """Of what each server has, how many are on other hosts."""
        return 0

    @property
    def cached(self) -> bool:
        """Whether the workers of a host share a replica, and one of them speaks with the servers for all."""
        return False

    @property
    def batch(self) -> int:
        """Samples per worker and step where the person names no number."""
        return 32

    @property
    def optimizer(self) -> str | None:
        """What it trains with where the person names no optimizer; None: what fits the model (`fairness.py`)."""
        return None

    @property
    def only_optimizer(self) -> str | None:
        """The one optimizer that it can train with, by its name in small letters; None: any that `check` lets pass."""
        return None

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that its settings name; the model must have them."""
        return ()

    def every_of(self, parameter: str) -> int:
        """Steps from one push of this parameter's gradients to the next, where servers own it."""
        return 1

    def check(self, asked: Asked) -> None:
        """Refuse, before any process starts, what cannot run as asked."""

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        """One step on this worker's share of the samples; returns its loss."""
        raise NotImplementedError

    def leave(self, replica: "Replica", comm: "Comm") -> None:
        """This worker is out of data, or pauses: from here until all have paused nobody may wait for it.

        Called where workers do not take every step together; each comes at its own time.
        """

    def regroup(self, replica: "Replica", comm: "Comm", *, is_new: bool) -> None:
        """Other workers are here than before, and what was under way between those is lost; called by all together.

        `is_new` is whether this worker had no part in it, and has what another one keeps.
        """

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        """Make the parameters of all replicas the same: before an evaluation, before a checkpoint, at the end.

        Called by all workers together, and only if there were steps since the last time.
        """
