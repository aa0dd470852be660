"""How workers and servers find each other, and the two ends that come of it: `connect` and `serve`.

On one host they meet in its memory. Between hosts a server publishes its address and its public key at the run's
meeting place, and each worker its public key; secret keys stay where they were made.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.cluster.hosts import Neighbourhood, address_towards
from manyhands.cluster.seat import Seat
from manyhands.cluster.world import Station
from manyhands.comm.transports.arena import Arena, require_memory
from manyhands.errors import UsageError
from manyhands.replica.parameters import sparse_ids, trained
from manyhands.replica.updates import Updates
from manyhands.servers.client import Line, Servers
from manyhands.servers.consistency import Clocks, Rule
from manyhands.servers.near import NearLine, NearPort
from manyhands.servers.ownership import GROUP_BYTES
from manyhands.servers.scheme import Scheme, describe
from manyhands.servers.server import Port, Server
from manyhands.servers.shard import Shard


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """A worker's parameters and gradients, in common memory as far as servers of its host use them."""

    params: Tensor
    grads: Tensor


def ordinary(length: int, dtype: torch.dtype) -> Tensor:
    """A vector in this process's own memory."""
    return torch.zeros(length, dtype=dtype)


def near_servers(seat: Seat, neighbours: Neighbourhood) -> list[int]:
    """The servers on this worker's host."""
    ranks = neighbours.beside(seat.rank)
    return [server for server in range(seat.servers) if seat.workers + server in ranks]


def own_vectors(
    seat: Seat,
    neighbours: Neighbourhood,
    arena: Arena,
    scheme: Scheme,
    speaker: int,
    allocate: Callable[[int, torch.dtype], Tensor],
) -> Vectors:
    """The vectors of the worker that speaks with the servers: this one, or another of its host for it."""
    near = near_servers(seat, neighbours)
    memory = scheme.memory(arena, seat.workers)
    length, dtype = scheme.layout.length, scheme.dtype
    return Vectors(
        params=memory.params if len(near) == seat.servers else allocate(length, dtype),
        grads=memory.grads(speaker) if near else allocate(length, dtype),
    )


def speakers(seat: Seat, neighbours: Neighbourhood, cached: bool) -> tuple[int, ...]:
    """The workers that speak with the servers: all, or the first of each host for the others."""
    return tuple(rank for ranks in neighbours.workers(seat) for rank in (ranks[:1] if cached else ranks))


def connect(
    seat: Seat,
    neighbours: Neighbourhood,
    arena: Arena,
    scheme: Scheme,
    rule: Rule,
    vectors: Vectors,
    clip_norm: float | None = None,
) -> Servers:
    """A worker's end; every server must be starting as well."""
    near = near_servers(seat, neighbours)
    memory = scheme.memory(arena, seat.workers) if near else None
    lines: list[Line] = []
    if len(near) < seat.servers:
        from manyhands.servers.wire import WireLine, make_keys  # a run on one host does without ZeroMQ

        keys = make_keys()
        neighbours.store.set(f"worker-key/{seat.rank}", keys[0].decode())
    for server in range(seat.servers):
        if memory is not None and server in near:
            lines.append(NearLine(memory, server))
        else:
            endpoint, key = json.loads(neighbours.store.get(f"server/{server}"))
            lines.append(WireLine(server, endpoint, key.encode(), keys))
    return Servers(
        seat.rank,
        lines,
        scheme.groups,
        rule,
        params=vectors.params,
        grads=vectors.grads,
        common=memory.vector if memory else None,
        versions=memory.versions(len(scheme.groups)) if memory else None,
        in_place=len(near) == seat.servers,
        clip_norm=clip_norm,
        digest=scheme.digest,
    )


def serve(
    station: Station,
    model: nn.Module,
    optimizer: Optimizer,
    rule: Rule,
    *,
    clip_norm: float | None = None,
    cached: bool = False,
    group_bytes: int = GROUP_BYTES,
) -> None:
    """Be a server of the run, until all workers have said goodbye."""
    server = _server(station, model, optimizer, rule, clip_norm, cached, group_bytes)
    try:
        server.run()
    finally:
        server.close()


def _server(
    station: Station,
    model: nn.Module,
    optimizer: Optimizer,
    rule: Rule,
    clip_norm: float | None,
    cached: bool,
    group_bytes: int,
) -> Server:
    seat, neighbours = station.seat, station.neighbours
    index = seat.server
    assert index is not None
    scheme = describe(model, optimizer, seat.servers, group_bytes)
    ranks = neighbours.beside(seat.rank)
    workers = speakers(seat, neighbours, cached)
    near = set(ranks).intersection(workers)
    length = scheme.layout.length
    if seat.rank == next(rank for rank in ranks if rank >= seat.workers):
        vectors = 1 + len(near) + len(scheme.states)
        require_memory(
            vectors * length * scheme.dtype.itemsize, "parameters, optimizer state and the workers' gradients"
        )
    memory = scheme.memory(station.arena, seat.workers)
    params = memory.params
    _, trained_params = trained(model, optimizer)
    if params.device != trained_params[0].device:
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    sparse = sparse_ids(model)
    trained_params.reverse()  # flat order is last parameter first
    updates = Updates(
        optimizer,
        scheme.layout,
        params,
        allocate=memory.state,
        sparse=[place for place, param in enumerate(trained_params) if id(param) in sparse],
    )
    own = [span for group in scheme.groups if group.server == index for span in group.spans]
    places = zip(scheme.layout.places, trained_params, strict=True)
    updates.take_over(own, {place.name: optimizer.state.get(param, {}) for place, param in places})
    shard = Shard(
        index,
        scheme.groups,
        scheme.layout.places,
        optimizer,
        updates,
        params,
        Clocks(rule, workers, in_place=bool(near)),
        versions=memory.versions(len(scheme.groups)),
        near_grads=memory.grads,
        awaits_scale=clip_norm is not None and rule.gathers,
    )
    ports: list[Port] = [NearPort(memory, index)] if near else []
    far = [rank for rank in workers if rank not in near]
    if far:
        from manyhands.servers.wire import WirePort, make_keys

        keys = make_keys()
        towards = seat.store.rpartition(":")[0] if seat.store else "127.0.0.1"
        port = WirePort(address_towards(towards), keys)
        neighbours.store.set(f"server/{index}", json.dumps([port.endpoint, keys[0].decode()]))
        port.allow({neighbours.store.get(f"worker-key/{rank}"): rank for rank in far})
        ports.append(port)
    for param in model.parameters():
        param.data = torch.empty(0)  # its values come from worker 0, and live in the flat vector
    return Server(shard, ports, near=near, workers=workers, digest=scheme.digest)
