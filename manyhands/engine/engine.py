"""A worker's session from the inside: what the step, pauses, saving and recovery share."""

import contextlib
import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import SGD

from manyhands import strategies, telemetry
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.engine import intervals
from manyhands.engine.class_counts import ClassReport
from manyhands.engine.feed import Feed
from manyhands.engine.feeds import MOST, Feeds
from manyhands.engine.first_steps import FirstSteps
from manyhands.engine.forward_writes import ForwardWrites
from manyhands.engine.frozen import Frozen
from manyhands.engine.generation import Generation
from manyhands.engine.progress import Progress
from manyhands.engine.same_data import STEPS, Signs, Twins
from manyhands.engine.saver import Saver
from manyhands.engine.script_state import ScriptState
from manyhands.engine.settings import Settings, Training
from manyhands.engine.siblings import Siblings, siblings_of
from manyhands.engine.spent_gradients import SpentGradients
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
    changes_nothing: bool = False
    """Whether it leaves the parameters as they are: servers hear nothing of it."""

    def complete(self) -> None:
        self.finish(self.loss)


@dataclass(frozen=True)
class Totals:
    """What all processes of the run did together, counted when the session ends."""

    bytes_sent: float
    shared_bytes: float
    staleness: dict[str, Any] | None


def groups_of(optimizer: Any) -> list[list[int]]:
    """The ids of an optimizer's parameters, by group."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def has_momentum(optimizer: Any) -> bool:
    """Whether it keeps what it keeps; other classes than SGD keep the same with all settings."""
    return type(optimizer) is not SGD or any(group["momentum"] for group in optimizer.param_groups)


class Engine:
    """What one worker's session is made of. `generation` is there once the worker has entered one."""

    generation: Generation
    class_report: ClassReport | None = None
    """Of the last evaluation that has counted by class."""
    has_graphs = False
    """Whether the script has gone back from a loss of its own."""

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
        self.siblings: Siblings[Engine] = siblings_of(world)
        self.placed = PlacedModel(settings.placement, world.rank_info.workers, world.rank, settings.example)
        self.progress = Progress(seed=settings.seed, full=self.placed.mesh.feeds)
        self.feeds = Feeds(pooled=self.traits.pooled)
        self.twins = Twins() if world.rank_info.workers > 1 else None  # until the first steps are made
        self.save_every = intervals.parse(settings.save_every)
        self.saver = Saver(world, self.warn)
        self.clock = Stopwatch()
        self.loss_watch = LossWatch(world.rank_info.known_as, self._suspects)
        self.trained = groups_of(training.optimizer)
        self.had_momentum = has_momentum(training.optimizer)
        self.script = ScriptState(training, is_synchronous=self.traits.synchronous)
        self.first_steps = FirstSteps()
        self.writes, self.frozen = ForwardWrites(self.traits, self.say_once), Frozen()
        self.spent = SpentGradients(self.say_once)
        # How all workers take over what their scripts have put into model or optimizer; set by the session.
        self.take_over: Callable[[Engine, bool], None] = lambda engine, trains: None
        self.joined_with: tuple[list[Any], Any] | None = None  # a late joiner's optimizer and scheduler
        self.plan: dict[str, Any] | None = None  # saved with every checkpoint, where there is one
        self.on_main: list[Any] = []  # what the main worker makes for all (`once.py`), in the script's order
        self.number = self.siblings.add(self)
        self.awaited: tuple[dict[str, Any], dict[str, Any]] | None = None  # a checkpoint that is to be loaded
        self.has_own_numbers = False  # whether this worker has begun its stream of random numbers
        # What the worker is in the middle of.
        self.replica_state = ReplicaState.NONE
        self.transaction: Transaction | None = None
        # As last told: the optimizer's settings and their digest; the data of the script's loop and their sign.
        self.told_settings: tuple[list[Any] | None, int] = None, 0
        self.told_data: tuple[Any, float] = None, 0.0
        self.pending: Any = None  # what is in gradients that wait for an update (`lower_level.py`)
        self.accumulates = False  # whether the script has made several of them wait at a time
        self.buffers_before: list[Tensor] = []  # the step, where it may be left out
        self.change_is_due = False  # all workers know that the members of the run are to change
        self.answering = 0  # what a worker has asked for and all workers are doing now
        self._said: dict[str, object] = {}
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
        self.script.enter(generation.replica, generation.servers, self.placed)
        if self.traits.synchronous and self.placed.is_whole:
            self.siblings.joint.enter(self.number, self.training.model, generation.world, self.say_once)
        self.writes.enter(generation)
        replica, traits = generation.replica, self.traits
        compares = traits.synchronous and generation.is_whole and not generation.is_alone
        self.frozen.enter(
            replica.parameters if compares else (), [place.name for place in replica.layout.places]
        )

    @property
    def has_entered(self) -> bool:
        """Whether the worker is, or was, in a generation."""
        return self.replica_state is not ReplicaState.NONE

    @property
    def holds_state(self) -> bool:
        """Whether the next generation may go on from this worker's replica."""
        return self.replica_state in (ReplicaState.WHOLE, ReplicaState.BEHIND)

    @property
    def feed(self) -> Feed:
        """The data of the script's own loop, or of the last one."""
        return self.feeds.last

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

    @property
    def outlives(self) -> bool:
        """Whether another process can go on with what this worker has of the replica, when it is dead."""
        return self.replica.outlives or self.generation.part_copies is not None

    def keep_copies(self) -> None:
        """What is no step has changed the replica: its copies follow."""
        self.replica.keep_buffers(self.progress.steps_here)
        if self.generation.part_copies is not None:
            self.generation.part_copies.make(self.progress.commits)

    def warn(self, warning: str) -> None:
        """Every worker records what it saw; worker 0 prints it, since all are likely to see the same."""
        steps = self.progress.steps
        telemetry.event("warning", step=steps, text=warning)
        if self.world.rank == 0:
            print(f"warning: step {steps}: {warning}", file=sys.stderr, flush=True)

    def say_once(self, line: str) -> None:
        """What a person should know, once in a session, however often it is so."""
        if (
            line and self._said.setdefault(line, mine := object()) is mine
        ):  # several threads may notice it at once
            self.warn(line)

    def warn_written(self, name: str) -> None:
        """The script has written into a parameter, of which other workers have the same or the same memory."""
        if not (self.traits.synchronous or self.served):
            return
        where = "so the models of the workers differ unless all write the same"
        if not self.generation.is_own:
            where = (
                "and they share it: what is not the same when it is done twice is done once for each of them"
            )
        self.say_once(
            f"parameter {name!r} was written to between two steps, by every worker for itself, {where}; assign it on "
            "every worker instead (param.data = …), which all take over together"
        )

    def warn_written_state(self, name: str) -> None:
        """The same of the optimizer's state."""
        if self.world.size > 1 and not self.generation.is_own:
            self.say_once(
                f"{name!r} of optimizer.state was written to between two steps, by every worker for itself, and they "
                "share it: what is not the same when it is done twice is done once for each of them; use "
                "optimizer.load_state_dict(…) on every worker instead, which all take over together"
            )

    def note_batches(self, batches: Sequence[Any]) -> None:
        """One of the first steps begins with these."""
        twins, used = self.twins, self.generation.used
        if twins is None:
            return
        twins.copies = self.generation.copies
        self.say_once(twins.note(batches, in_loop=bool(self.feeds.open)))
        if used is not None and twins.step <= STEPS:
            used.put(MOST + twins.step - 1, int(twins.signs[0]))
            if twins.step == 1:
                used.put(MOST + STEPS, int(twins.signs[1]))
        if twins.is_over:
            self.twins = None

    def look_for_twins(self, signs: Sequence[Signs] | None) -> None:
        """One of the first steps is made; with what the handshake has told of it, where there was one."""
        twins, used = self.twins, self.generation.used
        if twins is None:
            return
        if signs:
            self.say_once(twins.see(signs))
        elif used is not None:
            self.say_once(twins.look([row[MOST:] for row in used.values()[:: self.generation.copies]]))
        if twins.is_over:
            self.twins = None

    def keep_graphs(self) -> None:
        """The memory of this generation is about to go. A graph that the script has made with the model, as a GAN's for
        both of its sessions, may lead back into the parameters there."""
        if self.holds_state and (self.has_graphs or len(self.siblings.open) > 1):
            self.replica.memory.keep_values()

    def end(self) -> None:
        """This worker takes part in nothing more, and records the last step that it has committed."""
        self.is_closed = True
        if self.pending is not None:
            self.pending.keep()  # a script may still look
        self.siblings.end(self)
        self.siblings.joint.leave(self.number)
        telemetry.event("end", step=self.progress.steps)

    def terms(self) -> dict[str, Any]:
        """For the records: on what terms the run trains, by which one can tell whether its rate suits it."""
        tuning = strategies.tuning(self.strategy, self.world.size, len(self.world.hosts))
        waits = {"lockstep": self.traits.lockstep, "period": self.period}
        return {"rate": self._rate(), "late": tuning.late, **waits}

    def _rate(self) -> float:
        return max(float(group.get("lr", 0.0)) for group in self.training.optimizer.param_groups)

    def _suspects(self) -> Suspects:
        """The possible causes of a loss that goes wrong."""
        staleness = float(strategies.tuning(self.strategy, self.world.size, len(self.world.hosts)).late)
        with contextlib.suppress(PeerLost):
            if self.generation.servers:
                staleness = reports.staleness(reports.fetch(self.generation.servers))["mean"]
        return Suspects(
            rate=self._rate(),
            staleness=staleness,
            # Replicas that meet in groups, or each at its own pace, agree only at a pause.
            period=self.period if self.traits.lockstep and not self.has_groups else 1,
        )
