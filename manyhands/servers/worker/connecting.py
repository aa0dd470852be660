"""A worker's connections: through the host's memory with the servers of its host, over TCP with all others."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost
from manyhands.servers.process.write_ahead_log import Notes
from manyhands.servers.protocol.consistency import Consistency
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.local_socket import LocalConnection
from manyhands.servers.transport.meeting import find_server, worker_key, write
from manyhands.servers.worker.accumulator import Accumulator
from manyhands.servers.worker.client import Connection, Servers


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
    group: ServerGroup,
    arena: Arena,
    scheme: Scheme,
    service: Service,
    vectors: StartVectors,
    check: Callable[[], None] = lambda: None,
) -> Servers:
    """A worker's end; every server must be starting as well. `check` is called while waiting, and may raise."""
    rank_info, store, rule, cached = group.rank_info, group.neighbours.store, service.rule, service.cached
    near = group.local_servers(rank_info.rank)
    memory = scheme.memory(arena, group) if near else None
    lines: list[Connection] = []
    if len(near) < rank_info.servers:
        from manyhands.servers.transport.tcp import (  # a run on one host does without ZeroMQ
            TcpConnection,
            make_keys,
        )

        keys = make_keys()
        write(store, worker_key(rank_info.rank), keys[0].decode())
    try:
        for server in range(rank_info.servers):
            if memory is not None and server in near:
                lines.append(LocalConnection(memory, server, check))
            else:
                endpoint, key = find_server(store, server)
                lines.append(TcpConnection(server, endpoint, key, keys, check))
    except PeerLost:
        for line in lines:
            line.close(linger=False)
        raise
    return Servers(
        rank_info.rank,
        lines,
        scheme.groups,
        rule,
        params=vectors.params,
        grads=vectors.grads,
        common=memory.vector if memory else None,
        versions=memory.versions(len(scheme.groups)) if memory else None,
        near=near,
        in_place=group.computes_in_place(rank_info.rank, rule),
        clip_norm=service.clip_norm,
        digest=scheme.digest,
        generation=rank_info.generation,
        workers=len(group.speakers(cached=cached)),
        notes=Notes(memory) if memory is not None and rank_info.members and not rank_info.address else None,
        roam=rank_info.address is not None,
        cupboard=Accumulator(memory, scheme.groups)
        if memory is not None and rank_info.members and cached
        else None,
    )
