"""A worker's connections: through the host's memory with the servers of its host, over TCP with all others."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost
from manyhands.replica.replica import Replica
from manyhands.servers.protocol.consistency import Consistency
from manyhands.servers.protocol.push_notes import NoNotes, PushNotes
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.connection import Connection
from manyhands.servers.transport.local_socket import LocalConnection
from manyhands.servers.transport.meeting import find_server, worker_key, write
from manyhands.servers.worker.accumulator import Accumulator, SharedDeferrals
from manyhands.servers.worker.client import (
    AsynchronousServers,
    BoundedServers,
    ConfirmedBoundedServers,
    ConfirmedServers,
    ElasticGatheredServers,
    GatheredServers,
    Servers,
    Speaker,
)
from manyhands.servers.worker.clipping import ClippedAlone, ClippedTogether, Unclipped
from manyhands.servers.worker.deferral import Deferrals
from manyhands.servers.worker.server_connections import ServerConnections
from manyhands.servers.worker.worker_vectors import (
    CopiedParameters,
    InPlaceParameters,
    OutgoingGradients,
    ServedParameters,
)


@dataclass(frozen=True, kw_only=True)
class StartVectors:
    """A worker's parameters and gradients, in common memory as far as servers of its host use them."""

    params: Tensor
    grads: Tensor


def ordinary(length: int, dtype: torch.dtype) -> Tensor:
    """A vector in this process's own memory."""
    return torch.zeros(length, dtype=dtype)


def own_vectors(
    group: ServerGroup,
    arena: Arena,
    scheme: Scheme,
    rule: Consistency,
    speaker: int,
    allocate: Callable[[int, torch.dtype], Tensor],
) -> StartVectors:
    """The vectors of the worker that speaks with the servers: this one, or another of its host for it."""
    rank, memory = group.rank_info.rank, scheme.memory(arena, group)
    length, dtype = scheme.layout.length, scheme.dtype
    return StartVectors(
        params=memory.params if group.computes_in_place(rank, rule) else allocate(length, dtype),
        grads=memory.grads(speaker) if group.local_servers(rank) else allocate(length, dtype),
    )


def connect(
    group: ServerGroup, arena: Arena, scheme: Scheme, *, cached: bool, check: Callable[[], None]
) -> ServerConnections:
    """A worker's end; every server must be starting as well. `check` is called while waiting, and may raise."""
    rank_info, store = group.rank_info, group.neighbours.store
    local = group.local_servers(rank_info.rank)
    memory = scheme.memory(arena, group)
    connections: list[Connection] = []
    if len(local) < rank_info.servers:
        from manyhands.servers.transport.tcp import (  # a run on one host does without ZeroMQ
            TcpConnection,
            make_keys,
        )

        keys = make_keys()
        write(store, worker_key(rank_info.rank), keys[0].decode())
    try:
        for server in range(rank_info.servers):
            if server in local:
                connections.append(LocalConnection(memory, server, check))
            else:
                endpoint, key = find_server(store, server)
                connections.append(TcpConnection(server, endpoint, key, keys, check))
    except PeerLost:
        for connection in connections:
            connection.close(linger=False)
        raise
    made = ServerConnections(connections, scheme.groups)
    made.greet(
        worker=rank_info.rank,
        digest=scheme.digest,
        generation=rank_info.generation,
        workers=len(group.speakers(cached=cached)),
    )
    return made


def servers_of(
    group: ServerGroup,
    arena: Arena,
    scheme: Scheme,
    service: Service,
    connections: ServerConnections,
    vectors: StartVectors,
    replica: Replica,
    *,
    speaks_for: int = 1,
) -> Servers:
    """The servers as this worker sees them, in the variant that fits the service and the run."""
    rank_info, groups, rule = group.rank_info, scheme.groups, service.rule
    local = group.local_servers(rank_info.rank)
    memory = scheme.memory(arena, group) if local else None
    is_replaced = memory is not None and rank_info.members and not rank_info.address
    parameters: ServedParameters
    if memory is not None and group.computes_in_place(rank_info.rank, rule):
        parameters = InPlaceParameters(vectors.params, len(groups), memory)
    else:
        parameters = CopiedParameters(vectors.params, groups, memory)
    deferrals = Deferrals(groups)
    if memory is not None and rank_info.members and service.cached:
        deferrals = SharedDeferrals(groups, Accumulator(memory, groups))
    clipping = Unclipped()
    if service.clip_norm is not None and rule.gathers:
        clipping = ClippedTogether(service.clip_norm, connections)
    elif service.clip_norm is not None:
        clipping = ClippedAlone(service.clip_norm, replica.layout)
    return _variant(rule, is_elastic=rank_info.address is not None)(
        Speaker(
            number=rank_info.rank,
            generation=rank_info.generation,
            server_groups=rule.server_groups,
            speaks_for=speaks_for,
            notes=PushNotes(memory) if memory is not None and is_replaced else NoNotes(),
        ),
        groups,
        connections,
        replica,
        parameters,
        OutgoingGradients(vectors.grads, replica.tables, local),
        deferrals,
        clipping,
    )


def _variant(rule: Consistency, *, is_elastic: bool) -> type[Servers]:
    if rule.gathers:
        return ElasticGatheredServers if is_elastic else GatheredServers
    if rule.bound is None:
        return ConfirmedServers if is_elastic else AsynchronousServers
    return ConfirmedBoundedServers if is_elastic else BoundedServers
