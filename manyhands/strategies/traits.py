"""What the engine must know of a strategy, as data."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal

from manyhands.servers.protocol.service import Service


class Steps(IntEnum):
    """How the steps of the workers belong together: synchronous ones are also pooled, and both are made together."""

    SYNCHRONOUS = 3
    """A step equals one step of a single process on all workers' samples together."""
    POOLED = 2
    """Workers weight gradients by the samples of all workers: their sum is the gradient of the mean."""
    TOGETHER = 1
    """All workers take every step together; each weights gradients by its own samples."""
    ALONE = 0
    """No worker waits for another one at a step."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a strategy with its settings."""

    steps: Steps = Steps.TOGETHER
    replica: Literal["own", "shared", "open"] = "own"
    """Each worker has its own; or the workers of a host share one, and `comm` connects hosts; or each has its own,
    in memory that the other workers of its host can read and write."""
    topology: str = "native"
    """How `comm` sums: `native`, or the name of a schedule."""
    late: bool = False
    """A step makes safe only what was used before it: its own gradients are still in flight when it ends, or the
    replicas had met before."""
    by_clock: bool = False
    """The clock decides part of the computation, although workers step together."""
    same_settings: bool = True
    """The optimizers of all workers must have the same settings."""
    one_piece: bool = False
    """A step is more than a gradient at the parameters as they are and an update by it: it has no two halves."""
    servers: Service | None = None
    """How servers serve; None: the strategy uses no servers."""

    @cached_property
    def synchronous(self) -> bool:
        return self.steps >= Steps.SYNCHRONOUS

    @cached_property
    def parts_outlive(self) -> bool:
        """Whether parts of replicas are in the host's memory, where new workers take over those of dead ones."""
        return self.servers is None

    @cached_property
    def logs_parts(self) -> bool:
        """Whether an undo log of the optimizer's updates is enough for that: where the workers with the same part share
        it, and keep nothing beside the parameters. Others need a copy after every step. It must not depend on how many
        replicas there are: what a generation of several has left may be for one."""
        return self.synchronous and self.replica == "shared"

    @cached_property
    def pooled(self) -> bool:
        return self.steps >= Steps.POOLED

    @cached_property
    def lockstep(self) -> bool:
        return self.steps >= Steps.TOGETHER

    @cached_property
    def repeatable(self) -> bool:
        """Whether the same plan gives the same parameters again, to the bit."""
        return self.lockstep and not self.by_clock
