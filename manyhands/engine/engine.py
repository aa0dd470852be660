"""A worker's session from the inside: what the step, pauses, saving and recovery share."""

import contextlib
import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from manyhands import strategies, telemetry
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.engine import intervals
from manyhands.engine.feed import Feed
from manyhands.engine.generation import Generation
from manyhands.engine.progress import Progress
from manyhands.engine.saver import Saver
from manyhands.engine.settings import Settings, Training
from manyhands.engine.watch import LossWatch, Stopwatch, Suspects
from manyhands.errors import PeerLost
from manyhands.placement.placed import PlacedModel
from manyhands.replica.replica import Replica
from manyhands.replica.state.inheritance import Undo
from manyhands.servers.worker import reports


class ReplicaState(enum.Enum):
    """What this worker's replica is worth to the next generation."""

    NONE = enum.auto()
    """The worker has not entered a generation yet."""
    WHOLE = enum.auto()
    """It has every committed step."""
    BEHIND = enum.auto()
    """It lacks a committed step, which another host has."""
    OUTDATED = enum.auto()
    """The other workers have gone on without this worker."""


@dataclass
class Transaction:
    """A step, or an agreement of replicas, that is under way: all workers commit it, or none does."""

    undo: Undo | None
    finish: Callable[[float], None]
    loss: float
    is_done: bool = False
    """Whether this worker has done its part."""

    def complete(self) -> None:
        self.finish(self.loss)


@dataclass(frozen=True)
class Totals:
    """What all processes of the run did together, counted when the session ends."""

    bytes_sent: float
    shared_bytes: float
    staleness: dict[str, Any] | None


class Engine:
    """What one worker's session is made of. `generation` is there once the worker has entered one."""

    generation: Generation

    def __init__(self, training: Training, settings: Settings, world: World, member: Member | None) -> None:
        self.training = training
        # Where members may change, survivors must be able to finish the update of a worker that dies.
        self.settings = replace(settings, logged=settings.logged or member is not None)
        self.member = member
        self.strategy = strategies.parse(settings.strategy)
        self.traits = self.strategy.traits
        self.period = self.strategy.period
        # Otherwise all replicas learn from all in an exchange.
        self.has_groups = type(self.strategy).who_meets is not strategies.Strategy.who_meets
        self.world = world
        self.placed = PlacedModel(settings.placement, world.rank_info.workers, settings.example)
        self.progress = Progress(seed=settings.seed, full=self.placed.mesh.feeds)
        self.feed = Feed(pooled=self.traits.pooled)
        self.save_every = intervals.parse(settings.save_every)
        self.saver = Saver(world, self.warn)
        self.clock = Stopwatch()
        self.loss_watch = LossWatch(world.rank_info.known_as, self._suspects)
        self.trained = sum(len(group["params"]) for group in training.optimizer.param_groups)
        self.plan: dict[str, Any] | None = None  # saved with every checkpoint, where there is one
        # What the worker is in the middle of.
        self.replica_state = ReplicaState.NONE
        self.transaction: Transaction | None = None
        self.told_settings: tuple[list[Any] | None, int] = (
            None,
            0,
        )  # the optimizer's, as last told, and their digest
        self.change_is_due = False  # all workers know that the members of the run are to change
        self.answering = 0  # what a worker has asked for and all workers are doing now
        # How the session has ended.
        self.is_closed = False
        self.failure = ""
        self.totals: Totals | None = None

    def enter(self, generation: Generation) -> None:
        """A generation begins."""
        self.generation = generation
        self.world = self.saver.world = generation.world
        self.replica_state = ReplicaState.WHOLE
        self.change_is_due = False
        self.progress.steps_here = 0

    @property
    def has_entered(self) -> bool:
        """Whether the worker is, or was, in a generation."""
        return self.replica_state is not ReplicaState.NONE

    @property
    def holds_state(self) -> bool:
        """Whether the next generation may go on from this worker's replica."""
        return self.replica_state in (ReplicaState.WHOLE, ReplicaState.BEHIND)

    @property
    def replica(self) -> Replica:
        return self.generation.replica

    @property
    def comm(self) -> Comm:
        return self.generation.comm

    @property
    def served(self) -> bool:
        """Whether the parameters are on servers; a worker may leave it to a neighbour to talk to them."""
        return self.replica.is_served

    def warn(self, warning: str) -> None:
        """Every worker records what it saw; worker 0 prints it, since all are likely to see the same."""
        steps = self.progress.steps
        telemetry.event("warning", step=steps, text=warning)
        if self.world.rank == 0:
            print(f"warning: step {steps}: {warning}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """This worker takes part in nothing more, and records the last step that it has committed."""
        self.is_closed = True
        telemetry.event("end", step=self.progress.steps)

    def _suspects(self) -> Suspects:
        """The possible causes of a loss that goes wrong."""
        staleness = float(strategies.tuning(self.strategy, self.world.size, len(self.world.hosts)).late)
        with contextlib.suppress(PeerLost):
            if self.generation.servers:
                staleness = reports.staleness(reports.fetch(self.generation.servers))["mean"]
        return Suspects(
            rate=max(float(group.get("lr", 0.0)) for group in self.training.optimizer.param_groups),
            staleness=staleness,
            # Replicas that meet in groups, or each at its own pace, agree only at a pause.
            period=self.period if self.traits.lockstep and not self.has_groups else 1,
        )
