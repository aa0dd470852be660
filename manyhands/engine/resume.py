"""Go on from a checkpoint, on however many workers there are now."""

import json
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands import checkpoint, placement
from manyhands.checkpoint.background_write import wait_for
from manyhands.engine import random_state
from manyhands.engine.engine import Engine
from manyhands.engine.snapshot import adopt, from_record
from manyhands.errors import CheckpointError
from manyhands.replica.state import history
from manyhands.replica.state.per_worker import hand_out_apart
from manyhands.replica.state.state import distribute, owners_differ
from manyhands.servers.worker import saved_state


def resume(engine: Engine, directory: Path) -> dict[str, Any] | None:
    """Load the newest checkpoint, and go on from it; returns its `extra`, or None if there is no checkpoint."""
    tensors, record = _load(engine, directory)
    if record is None:
        return None
    _modernise(record, directory)
    if record["optimizer_class"] != type(engine.training.optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint in {directory} was made with {record['optimizer_class']} and this session has "
            f"{type(engine.training.optimizer).__name__}; use the same optimizer"
        )
    _load_replica(engine, tensors, record)
    adopt(engine, from_record(record, _groups(record, engine)))
    engine.replica.steps = engine.progress.steps
    if _same_workers(record, engine):
        random_state.restore(record["random"][engine.world.rank])
    return dict(record["extra"])


def _load_replica(engine: Engine, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """The parameters, the optimizer's state and what the strategy keeps."""
    placed, replica = engine.placed, engine.replica
    peers, states = placed.peers, record["optimizer"]
    if engine.served:
        saved_state.distribute(engine.generation.servers, replica, peers, placed.parts(tensors), states)
    else:
        own: dict[str, Tensor] = {}
        own_states = states
        if record["replicas"] == peers.size and not owners_differ(replica):
            own = hand_out_apart(tensors, peers) if placed.leads else {}
            own_states = record["apart"].get(str(peers.rank), states)
        tensors, own = placed.parts(tensors), placed.parts(own)
        distribute(replica, engine.comm, peers, tensors, states, own, own_states)
    if record["history"] is not None and replica.needs_closure and not engine.served:
        history.distribute(engine.training.optimizer, record["history"], tensors, engine.world)


def _groups(record: dict[str, Any], engine: Engine) -> list[Any]:
    """The optimizer settings of this worker, if there are as many replicas as there were; else those of worker 0."""
    peers, groups = engine.placed.peers, record["groups"]
    if record["replicas"] == peers.size:
        groups = record["groups_apart"].get(str(peers.rank), groups)
    return list(groups)


def _same_workers(record: dict[str, Any], engine: Engine) -> bool:
    same_placement = record["placement"] == placement.describe(engine.placed.placement)
    return bool(record["workers"] == engine.world.size and same_placement)


def _modernise(record: dict[str, Any], directory: Path) -> None:
    """Fill in what earlier versions did not save; refuse what is not the checkpoint of a session."""
    needed = (
        "steps",
        "epoch",
        "samples",
        "seed",
        "workers",
        "optimizer",
        "optimizer_class",
        "groups",
        "random",
    )
    if lacking := [name for name in needed if name not in record]:
        raise CheckpointError(
            f"the checkpoint in {directory} does not say {', '.join(lacking)}: it was not saved by a session, or by a "
            "version of manyhands that this one does not know; start again without it"
        )
    position = record.pop("position", 0)  # when all that was used were the first samples of the order
    record.setdefault("committed", [[0, position]] if position else [])
    record["random"] = [{"torch": one} if isinstance(one, str) else one for one in record["random"]]
    added: dict[str, Any] = {"apart": {}, "groups_apart": {}, "extra": {}, "checks": []}
    added |= {
        "scheduler": None,
        "history": None,
        "replicas": record["workers"],
        "placement": placement.DEFAULT,
    }
    for name, value in added.items():
        record.setdefault(name, value)


def _load(engine: Engine, directory: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Worker 0 reads and tells the others: they need not have a common disk."""
    world = engine.world
    tensors: dict[str, Tensor] = {}
    record: dict[str, Any] | None = None
    problem = ""
    if world.rank == 0:
        wait_for(directory)  # another session may be saving there
    if world.rank == 0 and directory.exists() and any(directory.iterdir()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                tensors, record = checkpoint.load(directory)
            except CheckpointError as error:
                problem = str(error)
        for warning in caught:
            engine.warn(str(warning.message))
    told = world.gather(json.dumps([problem, record]).encode() if world.rank == 0 else b"")[0]
    problem, record = json.loads(told)
    if problem:
        raise CheckpointError(problem)
    return tensors, record
