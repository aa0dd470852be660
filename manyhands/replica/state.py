"""A replica's state as a checkpoint holds it: by parameter name, whatever the layout and the number of workers."""

from typing import Any

import msgspec
import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from manyhands.cluster.world import World
from manyhands.comm.comm import Comm
from manyhands.errors import CheckpointError
from manyhands.replica.replica import Replica

# Where a value of the optimizer's state is: in a vector that covers all parameters, in a tensor of its own, or here.
VECTOR, TENSOR, NUMBER = "vector", "tensor", "number"

States = dict[str, dict[str, list[Any]]]


def spread(replica: Replica, comm: Comm, world: World) -> None:
    """Worker 0's parameters and buffers become everyone's."""
    for vector in (replica.params, replica.constants):
        _from_first(vector, replica, comm)
    world.host.barrier()
    with torch.no_grad():
        for buffer in replica.model.buffers():
            home = buffer.detach().to("cpu").contiguous().view(-1)
            if home.numel():
                world.comm.copy_(home)
                buffer.copy_(home.view(buffer.shape))


def _from_first(vector: Tensor, replica: Replica, comm: Comm) -> None:
    if vector.numel() and replica.leads:
        comm.copy_(vector)


def collect(replica: Replica, world: World) -> tuple[dict[str, Tensor], States]:
    """Everything that makes up the state; the tensors are complete on worker 0."""
    states: States = {}
    loose: dict[str, Tensor] = {}
    if world.rank in world.hosts[0]:  # every host has the same
        for param, values in replica.updates.export().items():
            for name, value in values.items():
                kind = VECTOR if value is None else TENSOR if isinstance(value, Tensor) else NUMBER
                states.setdefault(param, {})[name] = [kind, value if kind == NUMBER else None]
                if isinstance(value, Tensor):
                    loose[f"{param}/{name}"] = value.clone().contiguous()  # neighbours may share one
    tensors: dict[str, Tensor] = {}
    merged: States = {}
    for part in world.gather(msgspec.json.encode(states)):
        merged.update(msgspec.json.decode(part))
    for blob in world.gather(tensors_to_bytes(loose) if loose else b""):
        if blob:
            tensors |= {f"optimizer/{name}": value for name, value in tensors_from_bytes(blob).items()}
    for place in replica.layout.places:
        for name, (kind, _) in merged.get(place.name, {}).items():
            if kind == VECTOR:
                vector = replica.updates.vectors[name]
                tensors[f"optimizer/{place.name}/{name}"] = vector[place.start : place.stop].view(place.shape)
    for name, value in replica.model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"model/{name}"] = value
    return tensors, merged


def distribute(
    replica: Replica, comm: Comm, world: World, tensors: dict[str, Tensor], states: States
) -> None:
    """Take over what `collect` gave; worker 0 has the tensors."""
    if world.rank == 0:
        _load_model(replica, tensors)
    spread(replica, comm, world)
    for name, vector in replica.updates.vectors.items():
        if world.rank == 0:
            for place in replica.layout.places:
                saved = tensors.get(f"optimizer/{place.name}/{name}")
                if saved is not None and tuple(saved.shape) == place.shape:
                    vector[place.start : place.stop] = saved.view(-1)
        _from_first(vector, replica, comm)
    world.host.barrier()
    loose = {
        f"{param}/{name}": tensors[f"optimizer/{param}/{name}"].contiguous()
        for param, values in states.items()
        for name, (kind, _) in values.items()
        if kind == TENSOR and world.rank == 0
    }
    blob = world.gather(tensors_to_bytes(loose) if loose else b"")[0]
    known = tensors_from_bytes(blob) if blob else {}
    values: dict[str, dict[str, Any]] = {}
    for param, entries in states.items():
        for name, (kind, number) in entries.items():
            value = {VECTOR: None, NUMBER: number}.get(kind, known.get(f"{param}/{name}"))
            values.setdefault(param, {})[name] = value
    replica.updates.restore(list(replica.owned), values)


def _load_model(replica: Replica, tensors: dict[str, Tensor]) -> None:
    saved = {
        name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")
    }
    try:
        replica.model.load_state_dict(saved)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the checkpoint belongs to another model ({reason})") from None
