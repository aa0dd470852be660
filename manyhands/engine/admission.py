"""What a worker refuses before it begins to train."""

import inspect
from typing import Any

from manyhands import placement as placements
from manyhands import strategies
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World
from manyhands.engine.settings import Settings, Training
from manyhands.errors import UsageError
from manyhands.strategies import Asked


def admit(settings: Settings, training: Training, world: World | ServerContext) -> None:
    """Refuse what cannot run as asked."""
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
