"""Go on from a checkpoint, on however many workers there are now."""

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import Tensor

from manyhands import checkpoint, placement
from manyhands.checkpoint import index
from manyhands.checkpoint.background_write import wait_for
from manyhands.checkpoint.manifest import MANIFEST
from manyhands.data.ledger import Ranges
from manyhands.engine import coded_errors, random_state
from manyhands.engine.engine import Engine
from manyhands.engine.feed_record import FeedRecord
from manyhands.engine.snapshot import adopt, from_record
from manyhands.errors import CheckpointError
from manyhands.replica.state import whole_optimizer
from manyhands.replica.state.per_worker import hand_out_apart
from manyhands.replica.state.state import distribute, owners_differ
from manyhands.replica.state.transcoding import States
from manyhands.servers.worker import saved_state

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Groups = list[dict[str, Any]]


class SavedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the record of a session's checkpoint looks like; a file from others may hold anything."""

    steps: Count
    epoch: Count
    samples: Count
    seed: int
    workers: Count
    replicas: Count
    pace: Count = 0
    placement: str
    optimizer: States
    optimizer_class: str
    whole_optimizer: list[Any] | None
    apart: dict[str, States]
    groups: Groups
    groups_apart: dict[str, Groups]
    scheduler: dict[str, Any] | None
    random: list[dict[str, Any]]
    committed: Ranges
    streams: list[FeedRecord] = []
    inner_epochs: Count = 0
    checks: list[dict[str, Any]]
    extra: dict[str, Any]
    others: dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], Count] = {}


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
    groups, own = _groups(record, engine), engine.training.optimizer.param_groups
    if len(groups) != len(own):
        raise CheckpointError(
            f"the checkpoint in {directory} is of another model or optimizer: it has {len(groups)} parameter groups, "
            f"and this session has {len(own)}; use the same groups"
        )
    adopt(engine, from_record(record, groups))
    engine.awaited = tensors, record
    if engine.has_entered:
        load_awaited(engine)
    if _same_workers(record, engine):
        random_state.restore(record["random"][engine.world.rank])
    else:
        copies, seed = engine.placed.mesh.copies, engine.settings.random_seed
        random_state.go_on(
            record["random"], engine.world, copies=copies, seed=seed, steps=engine.progress.steps
        )
    if wrong := engine.siblings.compare(engine, engine.progress.steps, record.get("others", {})):
        engine.warn(wrong)
    _tell(engine, directory)
    return dict(record["extra"])


def _tell(engine: Engine, directory: Path) -> None:
    """Where the run goes on, said by worker 0."""
    if engine.world.rank == 0:
        is_one = index.NAME.fullmatch(directory.name) or (directory / MANIFEST).exists()
        place = directory if is_one else index.place_of(directory, engine.progress.steps)
        if place.is_relative_to(Path.cwd()):
            place = place.relative_to(Path.cwd())
        print(f"going on from {place} (epoch {engine.progress.epoch + 1})", file=sys.stderr, flush=True)


def load_awaited(engine: Engine) -> None:
    """Give the replica, which is there now, what a checkpoint has for it."""
    if engine.awaited is not None:
        _load_replica(engine, *engine.awaited)
        engine.replica.steps = engine.progress.steps
        engine.keep_copies()
        engine.awaited = None


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
        coded_errors.distribute(engine, tensors)
    if engine.served:
        return
    whole = record["whole_optimizer"]
    if replica.runs_whole != (whole is not None) and (states or whole):
        was, now = ("divided among workers", "whole") if whole is None else ("whole", "divided among workers")
        raise CheckpointError(
            f"{record['optimizer_class']} ran {was} when the checkpoint was made and runs {now} here; hooks on the "
            "optimizer, or parameters of several types, make the difference: have the same as then"
        )
    if whole is not None and replica.runs_whole:
        whole_optimizer.distribute(engine.training.optimizer, whole, tensors, engine.world)


def _groups(record: dict[str, Any], engine: Engine) -> list[Any]:
    """The optimizer settings of this worker, if there are as many replicas as there were; else those of worker 0."""
    placed, groups = engine.placed, record["groups"]
    if record["replicas"] == placed.mesh.replicas:
        groups = record["groups_apart"].get(str(placed.replica), groups)
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
    if isinstance(record["random"], list):
        record["random"] = [{"torch": one} if isinstance(one, str) else one for one in record["random"]]
    added: dict[str, Any] = {"apart": {}, "groups_apart": {}, "extra": {}, "checks": []}
    added |= {
        "scheduler": None,
        "whole_optimizer": None,
        "replicas": record["workers"],
        "placement": placement.DEFAULT,
    }
    for name, value in added.items():
        record.setdefault(name, value)
    try:
        msgspec.convert(record, SavedRecord)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise CheckpointError(
            f"the checkpoint in {directory} says what no session saves: {error}; go on from another one"
        ) from None


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
