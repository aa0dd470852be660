"""A session as a checkpoint: all workers give what they have, and worker 0 has it written."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands import placement, strategies
from manyhands.cluster.worker.world import World
from manyhands.engine import coded_errors, random_state
from manyhands.engine.engine import Engine
from manyhands.engine.snapshot import to_record
from manyhands.errors import Diverged
from manyhands.replica.state import state, whole_optimizer
from manyhands.replica.state.per_worker import differing
from manyhands.replica.state.state import owners_differ
from manyhands.replica.state.transcoding import States
from manyhands.servers.worker import saved_state


def save(engine: Engine, directory: Path, extra: dict[str, Any], keep: int) -> None:
    """Collect the state from all workers, and have it written."""
    world, placed, training = engine.world, engine.placed, engine.training
    _only_numbers(engine)
    own, model, states = placed.whole(engine.replica, *collect(engine))
    own |= coded_errors.collect(engine)
    apart: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if placed.leads and not engine.served and not owners_differ(engine.replica):
        tensors, apart = differing(own, states, placed.peers)
    form = None
    if world.rank == 0:
        tensors = own | model
    if world.rank == 0 and engine.replica.runs_whole and not engine.served:
        inside, form = whole_optimizer.collect(training.optimizer)
        tensors |= inside
    session = to_record(engine)
    settings = _of_all(placed.peers, session["groups"])
    random = _of_all(engine.world, random_state.capture())
    record = {
        **session,
        "workers": world.size,
        "replicas": placed.peers.size,
        "placement": placement.describe(placed.placement),
        "strategy": strategies.describe(engine.strategy),
        "plan": engine.plan,
        "optimizer": states,
        "whole_optimizer": form,
        "apart": apart,
        "optimizer_class": type(training.optimizer).__name__,
        "groups": settings[0],
        "groups_apart": {str(rank): own for rank, own in enumerate(settings) if own != settings[0]},
        "random": random,
        "extra": extra,
        "others": engine.siblings.steps_of_others(engine),
    }
    engine.saver.save(
        directory,
        step=engine.progress.steps,
        tensors=tensors,
        record=record if world.rank == 0 else None,
        keep=keep,
    )


def _only_numbers(engine: Engine) -> None:
    """Keep the checkpoint that is there, rather than replace it by one that no run can go on from."""
    is_finite = True
    for values in engine.replica.flat.values():
        lowest, highest = values.aminmax()  # either is NaN where any parameter is
        is_finite &= bool(torch.isfinite(lowest) and torch.isfinite(highest))
    for rank, row in enumerate(engine.world.exchange([float(is_finite)])):
        if not row[0]:
            raise Diverged(
                f"the parameters of worker {rank} are not finite after step {engine.progress.steps}, and are not "
                "saved; go on from the checkpoint before with a lower learning rate"
            )


def collect(engine: Engine) -> tuple[dict[str, Tensor], States]:
    """The state of the optimizer, and what the strategy keeps, as a checkpoint holds it."""
    if engine.served:
        return saved_state.collect(engine.generation.servers, engine.replica, engine.placed.peers)
    return state.collect(engine.replica, engine.placed.peers)


def _of_all(world: World, own: Any) -> list[Any]:
    """The plain values of all workers, by rank."""
    return [json.loads(row) for row in world.gather(json.dumps(own).encode())]
