"""A worker's session from the inside: what the step, pauses, saving and recovery share."""

import contextlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyhands import placement as placements
from manyhands import strategies, telemetry
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.rank_info import RankInfo
from manyhands.cluster.worker.world import ServerContext, World
from manyhands.comm.comm import Comm
from manyhands.engine import intervals, worker_process
from manyhands.engine.feed import Feed
from manyhands.engine.generation import Generation
from manyhands.engine.progress import Progress
from manyhands.engine.saver import Saver
from manyhands.engine.settings import Settings, Training
from manyhands.engine.watch import LossWatch, Stopwatch, Suspects
from manyhands.errors import PeerLost, UsageError
from manyhands.placement.placed import PlacedModel
from manyhands.replica.replica import Replica
from manyhands.replica.state.inheritance import Undo
from manyhands.servers.worker import reports
from manyhands.strategies import Asked


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


class Engine:
    """What one worker's session is made of. `generation` is there once the worker has entered one."""

    generation: Generation

    def __init__(self, training: Training, settings: Settings, world: World, member: Member | None) -> None:
        self.training = training
        self.settings = settings
        self.member = member
        self.strategy = strategies.parse(settings.strategy)
        self.traits = self.strategy
        self.world = world
        self.placed = PlacedModel(settings.placement, world.rank_info.workers, settings.example)
        self.progress = Progress(seed=settings.seed, full=self.placed.mesh.feeds)
        self.feed = Feed(pooled=self.traits.pooled)
        self.save_every = intervals.parse(settings.save_every)
        self.saver = Saver(world, self.warn)
        self.clock = Stopwatch()
        number = world.rank if world.rank_info.number is None else world.rank_info.number
        self.loss_watch = LossWatch(number, self._suspects)
        self.trained = sum(len(group["params"]) for group in training.optimizer.param_groups)
        self.logged = settings.logged or member is not None
        self.transaction: Transaction | None = None
        self.is_set_up = False
        self.has_state = True  # False where the others have gone on without this worker
        self.is_behind = False  # whether the replica lacks a committed step, which another host has
        self.change_is_due = False
        self.doing = 0  # of what workers ask each other for, what is being done now
        self.is_closed = False
        self.failure = ""
        self.plan: dict[str, Any] | None = None  # saved with every checkpoint, where there is one
        self.total_bytes: list[float] = []  # of all processes, once the session has ended
        self.staleness: dict[str, Any] | None = None

    def enter(self, generation: Generation) -> None:
        """A generation begins."""
        self.generation = generation
        self.world = self.saver.world = generation.world
        self.is_set_up = self.has_state = True
        self.is_behind = self.change_is_due = False
        self.progress.steps_here = 0

    @property
    def replica(self) -> Replica:
        return self.generation.replica

    @property
    def comm(self) -> Comm:
        return self.generation.comm

    @property
    def served(self) -> bool:
        """Whether the parameters are on servers; a worker may leave it to a neighbour to talk to them."""
        return self.replica.server_memory is not None

    @property
    def can_go_on(self) -> bool:
        """Whether the members of the run may change; a process with several sessions cannot rebuild them all."""
        if self.member is None or worker_process.others(self):
            return False
        # A model that is being divided for the first time is whole nowhere.
        new = self.member.new_generation
        return self.placed.is_whole or self.is_set_up or (new is not None and new.state_holders > 0)

    def warn(self, warning: str) -> None:
        """Every worker records what it saw; worker 0 says it, since all are likely to see the same."""
        steps = self.progress.steps
        telemetry.event("warning", step=steps, text=warning)
        if self.world.rank == 0:
            print(f"warning: step {steps}: {warning}", file=sys.stderr, flush=True)

    def _suspects(self) -> Suspects:
        """What a loss that goes wrong may be due to."""
        staleness = float(self.strategy.updates_late(self.world.size, len(self.world.hosts)))
        with contextlib.suppress(PeerLost):
            if self.generation.servers:
                staleness = reports.staleness(self.generation.servers.reports())["mean"]
        return Suspects(
            rate=max(float(group.get("lr", 0.0)) for group in self.training.optimizer.param_groups),
            staleness=staleness,
            period=self.strategy.period,
        )


def admit(settings: Settings, training: Training, world: World | ServerContext) -> None:
    """Refuse what cannot run as asked, before the workers begin."""
    if training.scheduler is not None:
        _admit_scheduler(training.scheduler)
    strategy = strategies.parse(settings.strategy)
    info = world.rank_info
    placed = placements.parse(settings.placement)
    mesh = placed.mesh(info.workers)
    asked = _asked(mesh.replicas, info, training, len(world.hosts) if isinstance(world, World) else None)
    placements.admit(placed, mesh, strategy, asked)
    strategies.admit(strategy, asked)
    strategies.admit_copies(strategy, have_hosts=info.address is not None)
    strategies.admit_model(strategy, [name for name, _ in training.model.named_parameters()])


def _admit_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose `step` needs more than the session has after a step."""
    wanted = inspect.signature(scheduler.step).parameters.values()
    takes_any = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [one.name for one in wanted if one.default is one.empty and one.kind not in takes_any]
    if missing:
        raise UsageError(
            f"{type(scheduler).__name__}.step needs {', '.join(missing)}, and the session steps its scheduler after "
            "every step, when there is no such thing; leave scheduler= out, and on every worker call "
            'scheduler.step(session.evaluate(data)["loss"]) where it is due'
        )


def _asked(replicas: int, info: RankInfo, training: Training, hosts: int | None) -> Asked:
    name = type(training.optimizer).__name__.lower()
    # The launcher has admitted what a run began with; a worker that joins may find fewer workers.
    workers = info.rows if info.generation and not info.address else replicas
    return Asked(workers=workers, servers=info.servers, optimizer=name, hosts=hosts)
