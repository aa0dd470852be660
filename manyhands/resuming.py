"""A session as a checkpoint: everything that the next step depends on."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands import checkpoint, placement, random_states, served, strategies
from manyhands.checkpoint.background import wait_for
from manyhands.cluster.world import World
from manyhands.errors import CheckpointError, Diverged
from manyhands.replica import history
from manyhands.replica.apart import differing, hand_out_apart
from manyhands.replica.state import distribute, owners_differ

PAIRS = "pairs"

if TYPE_CHECKING:
    from manyhands.sessions import Session


def save(session: "Session", directory: Path, extra: dict[str, Any], keep: int) -> None:
    """Collect the state from all workers, and have it written."""
    world, placing = session.world, session.placing
    _only_numbers(session)
    own, model, states = placing.whole(session.replica, *session.collect())
    apart: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if placing.leads and not session.served and not owners_differ(session.replica):
        tensors, apart = differing(own, states, placing.peers)
    form = None
    if world.rank == 0:
        tensors = own | model
    if world.rank == 0 and session.replica.needs_closure and not session.served:
        past, form = history.collect(session.optimizer)
        tensors |= past
    settings = _of_all(placing.peers, [plain(group) for group in session.optimizer.param_groups])
    random = _of_all(session.world, random_states.capture())
    record = {
        "steps": session.steps,
        "epoch": session.epoch,
        "committed": [list(one) for one in session.feed.committed],
        "checks": session.feed.checks,
        "samples": session.samples,
        "seed": session.seed,
        "workers": world.size,
        "replicas": placing.peers.size,
        "placement": placement.describe(placing.placement),
        "strategy": strategies.describe(session.strategy),
        "plan": session.plan,
        "optimizer": states,
        "history": form,
        "apart": apart,
        "optimizer_class": type(session.optimizer).__name__,
        "groups": settings[0],
        "groups_apart": {str(rank): own for rank, own in enumerate(settings) if own != settings[0]},
        "scheduler": plain(session.scheduler.state_dict()) if session.scheduler is not None else None,
        "random": random,
        "extra": extra,
    }
    session.saver.save(
        directory,
        step=session.steps,
        tensors=tensors,
        record=record if world.rank == 0 else None,
        keep=keep,
    )


def _only_numbers(session: "Session") -> None:
    """Keep the checkpoint that is there, rather than replace it by one that nobody can go on from."""
    lowest, highest = session.replica.params.aminmax()  # either is NaN where any parameter is
    is_finite = bool(torch.isfinite(lowest) and torch.isfinite(highest))
    for rank, row in enumerate(session.world.exchange([float(is_finite)])):
        if not row[0]:
            raise Diverged(
                f"the parameters of worker {rank} are not finite after step {session.steps}, and are not saved; "
                "go on from the checkpoint before with a lower learning rate"
            )


def resume(session: "Session", directory: Path) -> dict[str, Any] | None:
    """Become what was saved, on however many workers there are now."""
    tensors, record = _load(session, directory)
    if record is None:
        return None
    _modernise(record, directory)
    if record["optimizer_class"] != type(session.optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint in {directory} was made with {record['optimizer_class']} and this session has "
            f"{type(session.optimizer).__name__}; use the same optimizer"
        )
    world, placing, peers = session.world, session.placing, session.placing.peers
    own, own_states = {}, record["optimizer"]
    same_replicas = record["replicas"] == peers.size
    same_workers = record["workers"] == world.size and record["placement"] == placement.describe(
        placing.placement
    )
    if session.served:
        served.distribute(session.servers, session.replica, peers, placing.parts(tensors), own_states)
    else:
        if same_replicas and not owners_differ(session.replica):
            own = hand_out_apart(tensors, peers) if placing.leads else {}
            own_states = record["apart"].get(str(peers.rank), own_states)
        tensors, own = placing.parts(tensors), placing.parts(own)
        distribute(session.replica, session.comm, peers, tensors, record["optimizer"], own, own_states)
    if record["history"] is not None and session.replica.needs_closure and not session.served:
        history.distribute(session.optimizer, record["history"], tensors, world)
    session.steps = session.replica.steps = record["steps"]
    session.epoch = record["epoch"]
    session.feed.resume([(first, last) for first, last in record["committed"]], record["checks"])
    session.position = sum(last - first for first, last in record["committed"])
    session.samples, session.seed = record["samples"], record["seed"]
    groups = record["groups"]
    if same_replicas:
        groups = record["groups_apart"].get(str(peers.rank), groups)
    for group, saved in zip(session.optimizer.param_groups, groups, strict=True):
        group.update({key: like(value, group.get(key)) for key, value in saved.items()})
    if session.scheduler is not None and record["scheduler"] is not None:
        now = session.scheduler.state_dict()
        saved = record["scheduler"]
        session.scheduler.load_state_dict({key: like(value, now.get(key)) for key, value in saved.items()})
    if same_workers:
        random_states.restore(record["random"][world.rank])
    return dict(record["extra"])


def _modernise(record: dict[str, Any], directory: Path) -> None:
    """What earlier versions did not save is as it was for them; what is no session's checkpoint is refused."""
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


def _of_all(world: World, own: Any) -> list[Any]:
    """Everyone's plain values, by rank."""
    return [json.loads(row) for row in world.gather(json.dumps(own).encode())]


def _load(session: "Session", directory: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Worker 0 reads and the others are told: there need not be a common disk."""
    world = session.world
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
            session.warn(str(warning.message))
    told = world.gather(json.dumps([problem, record]).encode() if world.rank == 0 else b"")[0]
    problem, record = json.loads(told)
    if problem:
        raise CheckpointError(problem)
    return tensors, record


def plain(value: Any) -> Any:
    """Settings of an optimizer or a scheduler as JSON can hold them."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        items = {key: plain(item) for key, item in value.items() if key != "params"}
        # JSON has text for keys only: MultiStepLR counts its milestones by number.
        return (
            items
            if all(isinstance(key, str) for key in items)
            else {PAIRS: [[k, v] for k, v in items.items()]}
        )
    return value


def like(value: Any, example: Any) -> Any:
    """What JSON made of a setting, back in the type that the optimizer or the scheduler has."""
    if isinstance(value, dict) and PAIRS in value:
        return type(example)(dict(value[PAIRS]))
    if isinstance(example, tuple):
        return tuple(value)
    if isinstance(example, Tensor):
        return torch.full_like(example, value)
    if isinstance(example, list) and len(example) == len(value):
        return [like(item, other) for item, other in zip(value, example, strict=True)]
    if isinstance(value, dict) and isinstance(example, Mapping):
        return {key: like(item, example.get(key)) for key, item in value.items()}
    return value
