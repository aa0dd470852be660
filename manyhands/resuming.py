"""A session as a checkpoint: everything that the next step depends on."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands import checkpoint, placement, served, strategies, telemetry
from manyhands.cluster.world import World
from manyhands.errors import CheckpointError, Diverged
from manyhands.replica.apart import collect_apart, hand_out_apart
from manyhands.replica.state import distribute, model_tensors, owners_differ

PAIRS = "pairs"

if TYPE_CHECKING:
    from manyhands.sessions import Session


def save(session: "Session", directory: Path, extra: dict[str, Any]) -> Path:
    """Collect the state from all workers; worker 0 writes, the others wait until it is safe on disk."""
    world = session.world
    _only_numbers(session)
    if session.replica.needs_closure and world.rank == 0:
        name = type(session.optimizer).__name__
        warnings.warn(f"the history of {name} is not saved: a resumed run builds it anew", stacklevel=3)
    own, states = session.collect()
    model = model_tensors(session.replica)
    if session.assembly:
        states = session.assembly.states(states)
        whole = session.assembly.whole(own | model)
        model = {name: value for name, value in whole.items() if name.startswith("model/")}
        own = {name: value for name, value in whole.items() if name not in model}
    everyone_has_its_own = not session.served and not owners_differ(session.replica)
    others: dict[str, Tensor] = {}
    apart: dict[str, Any] = {}
    if everyone_has_its_own and session.leads:
        others, apart = collect_apart(own, states, session.peers)
    tensors = own | others | model
    settings = _settings_of_all(session)
    random = world.gather(torch.get_rng_state().numpy().tobytes())
    problem = ""
    if world.rank == 0:
        record = {
            "steps": session.steps,
            "epoch": session.epoch,
            "position": session.position,
            "samples": session.samples,
            "seed": session.seed,
            "workers": world.size,
            "replicas": session.peers.size,
            "placement": placement.describe(session.placement),
            "strategy": strategies.describe(session.strategy),
            "optimizer": states,
            "apart": apart,
            "optimizer_class": type(session.optimizer).__name__,
            "groups": settings[0],
            "groups_apart": {str(rank): own for rank, own in enumerate(settings) if own != settings[0]},
            "scheduler": _plain(session.scheduler.state_dict()) if session.scheduler is not None else None,
            "random": [state.hex() for state in random],
            "extra": extra,
        }
        try:
            checkpoint.save(directory, step=session.steps, tensors=tensors, record=record)
        except CheckpointError as error:
            problem = str(error)
    told = world.gather(problem.encode())[0]
    if told:
        raise CheckpointError(told.decode())
    telemetry.event("checkpoint", step=session.steps)
    return directory


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
    tensors, record = _load(session.world, directory)
    if record is None:
        return None
    if record["optimizer_class"] != type(session.optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint in {directory} was made with {record['optimizer_class']} and this session has "
            f"{type(session.optimizer).__name__}; use the same optimizer"
        )
    world = session.world
    own, own_states = {}, record["optimizer"]
    same_replicas = record.get("replicas", record["workers"]) == session.peers.size
    if session.served:
        served.distribute(session.servers, session.replica, world, tensors, own_states)
    else:
        if same_replicas and not owners_differ(session.replica):
            own = hand_out_apart(tensors, session.peers) if session.leads else {}
            own_states = record["apart"].get(str(session.peers.rank), own_states)
        if session.assembly:
            tensors, own = session.assembly.own(tensors), session.assembly.own(own)
        distribute(
            session.replica, session.comm, session.peers, tensors, record["optimizer"], own, own_states
        )
    session.steps = session.replica.steps = record["steps"]
    session.epoch, session.position = record["epoch"], record["position"]
    session.samples, session.seed = record["samples"], record["seed"]
    groups = record["groups"]
    if same_replicas:
        groups = record["groups_apart"].get(str(session.peers.rank), groups)
    for group, saved in zip(session.optimizer.param_groups, groups, strict=True):
        group.update({key: _like(value, group.get(key)) for key, value in saved.items()})
    if session.scheduler is not None and record["scheduler"] is not None:
        now = session.scheduler.state_dict()
        saved = record["scheduler"]
        session.scheduler.load_state_dict({key: _like(value, now.get(key)) for key, value in saved.items()})
    same_places = record.get("placement", placement.DEFAULT) == placement.describe(session.placement)
    if record["workers"] == world.size and same_places:
        state = bytes.fromhex(record["random"][world.rank])
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return dict(record["extra"])


def _settings_of_all(session: "Session") -> list[Any]:
    """The optimizers' settings, by rank: some strategies let them differ."""
    own = [_plain(group) for group in session.optimizer.param_groups]
    return [json.loads(row) for row in session.peers.gather(json.dumps(own).encode())]


def _load(world: World, directory: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Worker 0 reads and the others are told: there need not be a common disk."""
    tensors: dict[str, Tensor] = {}
    record: dict[str, Any] | None = None
    problem = ""
    if world.rank == 0 and directory.exists() and any(directory.iterdir()):
        try:
            tensors, record = checkpoint.load(directory)
        except CheckpointError as error:
            problem = str(error)
    told = world.gather(json.dumps([problem, record]).encode() if world.rank == 0 else b"")[0]
    problem, record = json.loads(told)
    if problem:
        raise CheckpointError(problem)
    return tensors, record


def _plain(value: Any) -> Any:
    """Settings of an optimizer or a scheduler as JSON can hold them."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items() if key != "params"}
        # JSON has text for keys only: MultiStepLR counts its milestones by number.
        return (
            items
            if all(isinstance(key, str) for key in items)
            else {PAIRS: [[k, v] for k, v in items.items()]}
        )
    return value


def _like(value: Any, example: Any) -> Any:
    """What JSON made of a setting, back in the type that the optimizer or the scheduler has."""
    if isinstance(value, dict) and PAIRS in value:
        return type(example)(dict(value[PAIRS]))
    if isinstance(example, tuple):
        return tuple(value)
    if isinstance(example, Tensor):
        return torch.full_like(example, value)
    if isinstance(example, list) and len(example) == len(value):
        return [_like(item, other) for item, other in zip(value, example, strict=True)]
    if isinstance(value, dict) and isinstance(example, Mapping):
        return {key: _like(item, example.get(key)) for key, item in value.items()}
    return value
