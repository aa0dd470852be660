"""The optimizer's state on the servers, from there to a checkpoint and back."""

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch as safetensors
import torch
from torch import Tensor

from manyhands.cluster.worker.world import World
from manyhands.replica.optimizer.abilities import vector_states
from manyhands.replica.replica import Replica
from manyhands.replica.state import packing
from manyhands.replica.state.state import load_model
from manyhands.replica.state.transcoding import NUMBER, VECTOR, States, Values, entry, value_of
from manyhands.servers.protocol.messages import AskState, Done, GiveState, OptimizerState
from manyhands.servers.worker.client import Servers
from manyhands.servers.worker.joining import begin


def collect(servers: Servers | None, replica: Replica, world: World) -> tuple[dict[str, Tensor], States]:
    """The optimizer's state from all servers, on worker 0."""
    tensors: dict[str, Tensor] = {}
    states: States = {}
    if world.rank == 0 and servers is not None:
        known, vectors = _asked(servers)
        for place in replica.layout.places:
            for name, value in known.get(place.name, {}).items():
                kind, _ = states.setdefault(place.name, {})[name] = entry(value)
                if kind == VECTOR:
                    value = vectors[name][place.start : place.stop].view(place.shape)
                if kind != NUMBER:
                    tensors[f"optimizer/{place.name}/{name}"] = value
    world.comm.sum_of(0.0)
    return tensors, states


def told_by_first(
    tensors: Mapping[str, Tensor], states: States, world: World
) -> tuple[dict[str, Tensor], States]:
    """What `collect` has given worker 0, on every worker."""
    own = {name: value.contiguous() for name, value in tensors.items()}
    blob = world.gather(safetensors.save(own) if own else b"")[0]
    return safetensors.load(blob) if blob else {}, json.loads(world.gather(json.dumps(states).encode())[0])


def _asked(servers: Servers) -> tuple[Values, dict[str, Tensor]]:
    """What the servers know by parameter, with None for what is in one of the vectors that come with it."""
    known: Values = {}
    for part in servers.connections.ask(lambda number: AskState(number=number), OptimizerState):
        for param, values in packing.unpack(part.states).items():
            known.setdefault(param, {}).update(values)
    names = {name for values in known.values() for name, value in values.items() if value is None}
    return known, {name: servers.vector(name) for name in sorted(names)}


def read(servers: Servers, replica: Replica) -> Values:
    """The optimizer's state as the servers have it when they are asked: a copy, for one worker by itself."""
    servers.settle()
    known, vectors = _asked(servers)
    return {
        place.name: {
            name: place.own(vectors[name]).clone() if value is None else value
            for name, value in known[place.name].items()
        }
        for place in replica.layout.places
        if known.get(place.name)
    }


def give(servers: Servers | None, replica: Replica, states: Values) -> None:
    """The inverse, on every worker: those that lead give what they have to their servers, which forget the rest."""
    if servers is None or not servers.leads:
        return
    vectors = {name: torch.zeros_like(replica.params) for name in vector_states(replica.optimizer)}
    told: Values = {}
    for place in replica.layout.places:
        for name, value in states.get(place.name, {}).items():
            if name in vectors and isinstance(value, Tensor) and tuple(value.shape) == place.shape:
                vectors[name][place.start : place.stop] = value.flatten()
                value = None
            told.setdefault(place.name, {})[name] = value
    for name, vector in vectors.items():
        servers.put(name, vector)
    states_bytes = packing.pack(told)
    servers.connections.ask(lambda number: GiveState(number=number, states=states_bytes), Done)


def distribute(
    servers: Servers | None, replica: Replica, world: World, tensors: Mapping[str, Tensor], states: States
) -> None:
    """The inverse: worker 0 has read a checkpoint, the servers take it over; of several server groups, each of them."""
    if world.rank == 0:
        load_model(replica, tensors)
    if servers is not None and servers.server_groups > 1:
        optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
        tensors = safetensors.load(world.gather(safetensors.save(optimizer))[0])
    if servers is not None and servers.leads:
        values: dict[str, dict[str, Any]] = {}
        vectors: dict[str, Tensor] = {}
        for place in replica.layout.places:
            for name, found in states.get(place.name, {}).items():
                saved = tensors.get(f"optimizer/{place.name}/{name}")
                if found[0] == VECTOR and saved is not None:
                    vector = vectors.setdefault(name, torch.zeros_like(replica.params))
                    vector[place.start : place.stop] = saved.view(-1)
                values.setdefault(place.name, {})[name] = value_of(found, saved)
        for name, vector in vectors.items():
            servers.put(name, vector)
        states_bytes = packing.pack(values)
        servers.connections.ask(lambda number: GiveState(number=number, states=states_bytes), Done)
    begin(servers, replica, world)
