"""A replica's state as a checkpoint holds it: by parameter name, whatever the layout and the number of workers."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.errors import CheckpointError, TornUpdate, UsageError
from manyhands.replica.layout import Place
from manyhands.replica.replica import Replica
from manyhands.replica.state import buffers
from manyhands.replica.state.transcoding import (
    NUMBER,
    TENSOR,
    VECTOR,
    States,
    Values,
    put_together,
    take_apart,
)


def spread(replica: Replica, comm: Comm, world: World) -> None:
    """Worker 0's parameters and buffers become everyone's."""
    # Parameters that live on servers come from there.
    for vector in [replica.constants] if replica.is_served else [replica.params, replica.constants]:
        from_first(vector, replica, comm)
    world.host.barrier()
    buffers.from_first(replica.part.buffers(), world)


def begin_alike(model: nn.Module, world: World) -> None:
    """Worker 0's parameters and buffers become everyone's, before the model is divided among workers."""
    buffers.from_first([*model.parameters(), *model.buffers()], world)


def give_back_state(replica: Replica, tensors: Mapping[str, Tensor], states: States) -> None:
    """Put the optimizer's state, as it was collected, where plain PyTorch keeps it: into the user's optimizer."""
    originals = replica.part.originals(
        replica.parameters
    )  # a script may have taken some out of the model since
    own = {place.name: one for place, one in zip(replica.layout.places, originals, strict=True)}
    give_whole_state(own, replica.optimizer, tensors, states)


def give_whole_state(
    params: Mapping[str, Any], optimizer: Optimizer, tensors: Mapping[str, Tensor], states: States
) -> None:
    """The same by the names of the user's parameters."""
    for param, values in states.items():
        for name, (kind, number) in values.items():
            value = number if kind == NUMBER else tensors[f"optimizer/{param}/{name}"].clone()
            optimizer.state[params[param]][name] = value


def from_first(vector: Tensor, replica: Replica, comm: Comm, source: int = 0) -> None:
    if vector.numel() and replica.leads:
        comm.copy_(vector, source)


def collect(replica: Replica, world: World) -> tuple[dict[str, Tensor], States]:
    """Everything that this worker's next step depends on, what neighbours hold for it included; not the model."""
    states, loose = take_apart(replica.updates.export())
    if owners_differ(replica):
        states, loose = _from_owners(states, loose, world)
    tensors = {f"optimizer/{name}": value for name, value in loose.items()}
    for place in replica.layout.places:
        for name, (kind, _) in states.get(place.name, {}).items():
            if kind == VECTOR:
                vector = replica.updates.vectors[name]
                tensors[f"optimizer/{place.name}/{name}"] = vector[place.start : place.stop].view(place.shape)
    return tensors | {f"kept/{name}": vector for name, vector in replica.kept.items()}, states


def owners_differ(replica: Replica) -> bool:
    """Whether the workers of a host divide one replica among them."""
    return replica.lanes > 1 and replica.steps_together


def _from_owners(states: States, loose: dict[str, Tensor], world: World) -> tuple[States, dict[str, Tensor]]:
    """What each owner of the first host alone knows, merged; every host has the same."""
    speaks = world.rank in world.hosts[0]
    merged: States = {}
    tensors: dict[str, Tensor] = {}
    for part in world.gather(msgspec.json.encode(states if speaks else {})):
        merged.update(msgspec.json.decode(part))
    for blob in world.gather(tensors_to_bytes(loose) if loose and speaks else b""):
        tensors |= tensors_from_bytes(blob) if blob else {}
    return merged, tensors


def model_tensors(replica: Replica) -> dict[str, Tensor]:
    """The model itself, the same on all workers when they pause."""
    return {f"model/{name}": value for name, value in replica.part.tensors().items()}


def distribute(
    replica: Replica,
    comm: Comm,
    world: World,
    tensors: dict[str, Tensor],
    states: States,
    own: dict[str, Tensor],
    own_states: States,
) -> None:
    """Take over what was collected: worker 0 has the tensors, and each worker `own`, which differ from them."""
    if world.rank == 0:
        load_model(replica, tensors)
    spread(replica, comm, world)
    for name, vector in replica.updates.vectors.items():
        if world.rank == 0:
            for place in replica.layout.places:
                saved = tensors.get(f"optimizer/{place.name}/{name}")
                if saved is not None and tuple(saved.shape) == place.shape:
                    vector[place.start : place.stop] = saved.view(-1)
        if replica.is_shared and not replica.steps_together:
            world.comm.copy_(vector)  # each worker has its own
        else:
            from_first(vector, replica, comm)
    world.host.barrier()
    for name, vector in replica.updates.vectors.items():
        for place in replica.layout.places:
            differing = own.get(f"optimizer/{place.name}/{name}")
            if differing is not None and tuple(differing.shape) == place.shape:
                vector[place.start : place.stop] = differing.view(-1)
    _restore_kept(replica, world, tensors, own)
    loose = {
        f"{param}/{name}": tensors[f"optimizer/{param}/{name}"].contiguous()
        for param, values in states.items()
        for name, (kind, _) in values.items()
        if kind == TENSOR and f"optimizer/{param}/{name}" in tensors
    }
    blob = world.gather(tensors_to_bytes(loose) if loose else b"")[0]
    known = tensors_from_bytes(blob) if blob else {}
    known |= {name.removeprefix("optimizer/"): value for name, value in own.items()}
    replica.updates.restore(replica.owned, put_together(own_states, known))


def _restore_kept(replica: Replica, world: World, tensors: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """What the strategy kept: worker 0's, and on top of it what this worker had for itself."""
    replica.kept.clear()
    kept = {name: value.contiguous() for name, value in tensors.items() if name.startswith("kept/")}
    blob = world.gather(tensors_to_bytes(kept) if kept else b"")[0]
    for name, value in {**(tensors_from_bytes(blob) if blob else {}), **own}.items():
        if name.startswith("kept/"):
            replica.kept[name.removeprefix("kept/")] = value.to(replica.params.device)


def load_model(replica: Replica, tensors: Mapping[str, Tensor]) -> None:
    """The model's own tensors out of a checkpoint."""
    saved = {
        name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")
    }
    try:
        replica.part.load(saved)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the checkpoint belongs to another model ({reason})") from None


def known_here(replica: Replica, names: Collection[str] | None = None) -> Values:
    """The state of some parameters, or of all, as far as it is on this worker's host."""
    layout, owned = replica.layout, {span.index for span in replica.owned}
    wanted = [
        span
        for span in replica.spans
        if names is None or any(layout.places[index].name in names for index in span.places)
    ]
    known = replica.updates.export([span for span in wanted if span.index in owned])
    try:
        found = replica.updates.others([span for span in wanted if span.index not in owned])
    except TornUpdate:
        raise UsageError(
            f"some parameters' state of {type(replica.optimizer).__name__} is known to other workers only: call "
            "session.optimizer_state() on every worker instead of optimizer.state_dict()"
        ) from None
    for name, state in found.items():
        known.setdefault(name, {}).update(state)
    return {
        place.name: _with_vectors(known[place.name], place, replica.updates.vectors)
        for place in layout.places
        if known.get(place.name) and (names is None or place.name in names)
    }


def _with_vectors(state: Mapping[str, Any], place: Place, vectors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: place.own(vectors[name])
        if value is None
        else value.clone()
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }
