"""A server of a run whose hosts come and go: it serves one generation after the other, and keeps what it has.

In each generation it has another place among the servers, other workers, and perhaps other groups. Workers of its host
reach it through the host's memory, all others through ZeroMQ.
"""

import contextlib
import json
import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.cluster.worker.server_context import ServerContext
from manyhands.comm.transports.arena import Arena, require_memory
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.optimizer.updates import Updates
from manyhands.servers.process.backup import Backup
from manyhands.servers.process.peer_servers import PeerPort
from manyhands.servers.process.server import Port, Server
from manyhands.servers.process.shard import Shard
from manyhands.servers.protocol.consistency import Clocks, Consistency
from manyhands.servers.protocol.messages import Hello, encode
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup, own_server_group
from manyhands.servers.transport.connection import Connection
from manyhands.servers.transport.local_socket import LocalPort
from manyhands.servers.transport.meeting import read, write


def roam(
    contexts: Iterator[ServerContext],
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Consistency,
    *,
    copies: int,
    clip_norm: float | None,
) -> None:
    """Be a server, until all workers have said goodbye or there are no more stations."""
    holding: Backup | None = None
    shard: Shard | None = None
    for context in contexts:
        party = own_server_group(context.rank_info, context.neighbours, 1)
        if holding is None:
            # Stations are closed with their generations, and what the server has stays.
            lasting = Arena(os.dup(context.arena.fd))
            holding = _holding(lasting, party, model, optimizer, scheme, rule)
        try:
            shard = _shard(context, party, optimizer, scheme, rule, holding, copies, clip_norm, shard)
            server = _server(context, party, scheme, copies, shard)
        except PeerLost:
            continue  # the generation is over
        try:
            server.run()
        except PeerLost:
            server.close(linger=False)
        else:
            server.close()
            return


def _holding(
    arena: Arena,
    party: ServerGroup,
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Consistency,
) -> Backup:
    rank_info, length = party.rank_info, scheme.layout.length
    ranks = party.neighbours.beside(rank_info.rank)
    if rank_info.rank == next(rank for rank in ranks if rank >= rank_info.workers):
        near = sum(rank < rank_info.workers for rank in ranks)
        vectors = (1 + len(scheme.states)) * (1 + rule.gathers) + near
        require_memory(
            vectors * length * scheme.dtype.itemsize, "parameters, optimizer state and the workers' gradients"
        )
    memory = scheme.memory(arena, party)
    if next(model.parameters()).device.type != "cpu":
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    updates = Updates(optimizer, scheme.layout, memory.params, allocate=memory.state, exact=False)
    for param in model.parameters():
        param.data = torch.empty(0)  # its values come from worker 0, and live in the flat vector
    return Backup(scheme.groups, optimizer, updates, memory.params, goes_back=rule.gathers)


def _shard(
    context: ServerContext,
    party: ServerGroup,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Consistency,
    holding: Backup,
    copies: int,
    clip_norm: float | None,
    before: Shard | None,
) -> Shard:
    rank_info, memory = party.rank_info, scheme.memory(context.arena, party)
    assert rank_info.server is not None
    holding.begin_generation(rank_info.generation, follows=context.follows)
    workers = party.speakers(cached=False)
    near = set(party.neighbours.beside(rank_info.rank)).intersection(workers)
    return Shard(
        rank_info.server,
        scheme.assigned(party, copies).groups,
        scheme.layout.places,
        optimizer,
        holding.updates,
        holding.vectors["params"],
        Clocks(rule, workers, in_place=bool(near)),
        versions=memory.versions(len(scheme.groups)),
        near_grads=memory.grads,
        awaits_scale=clip_norm is not None and rule.gathers,
        copies=[rank for rank in workers if not party.computes_in_place(rank, rule)],
        holding=holding,
        copier=lambda server: _copier(party, server),
        before=before,
    )


def _copier(party: ServerGroup, server: int) -> int:
    """By which number a server is known to one that forwards updates to it; one that comes to us has its rank."""
    return party.rank_info.size + party.rank_info.workers + server


def _server(context: ServerContext, party: ServerGroup, scheme: Scheme, copies: int, shard: Shard) -> Server:
    rank_info, index = party.rank_info, party.rank_info.server
    assert index is not None
    ranks = party.neighbours.beside(rank_info.rank)
    workers = party.speakers(cached=False)
    near = set(ranks).intersection(workers)
    groups = scheme.assigned(party, copies).groups
    owners = {rank_info.workers + group.server for group in groups if group.copy == index}
    targets = sorted({group.copy for group in groups if group.server == index and group.copy is not None})
    ports: list[Port] = []
    lines: dict[int, Connection] = {}
    with contextlib.ExitStack() as stack:
        if near:
            ports.append(LocalPort(scheme.memory(context.arena, party), index))
            stack.callback(ports[0].close)
        far = [rank for rank in workers if rank not in near] + sorted(owners)
        if far or targets:
            from manyhands.servers.transport.tcp import TcpConnection, TcpPort, make_keys

            assert rank_info.address is not None
            store, keys = party.neighbours.store, make_keys()
            port = TcpPort(rank_info.address, keys)
            ports.append(port)
            stack.callback(port.close, linger=False)
            write(store, f"worker-key/{rank_info.rank}", keys[0].decode())
            write(store, f"server/{index}", json.dumps([port.endpoint, keys[0].decode()]))
            for target in targets:
                endpoint, key = json.loads(read(store, f"server/{target}"))
                line = TcpConnection(target, endpoint, key.encode(), keys)
                stack.callback(line.close, linger=False)
                line.send(encode(Hello(number=1, worker=rank_info.rank, digest=scheme.digest)))
                lines[_copier(party, target)] = line
            port.allow({read(store, f"worker-key/{rank}"): rank for rank in far})
        stack.pop_all()
    return Server(
        shard,
        ports,
        near=near,
        workers=workers,
        guests=(),
        lines=PeerPort(lines, lines.__getitem__),  # a loss ends the generation: nobody is reached again
        digest=scheme.digest,
        peers={*owners, *lines},
        check=context.check,
        generation=rank_info.generation,
    )
