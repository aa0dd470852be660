"""A server process from its start to its end: it claims memory, opens its ports, and serves until all workers leave."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.cluster.launchers.addresses import address_towards
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.errors import UsageError
from manyhands.replica.parameters import trained
from manyhands.replica.state.slice_of import TensorSlice
from manyhands.servers.process.dispatcher import Dispatcher
from manyhands.servers.process.elastic_server import serve_elastically
from manyhands.servers.process.participants import Participants
from manyhands.servers.process.peer_servers import peer_key, visit
from manyhands.servers.process.server import Port, Server
from manyhands.servers.process.server_position import ServerPosition
from manyhands.servers.process.shard_building import serve_from_start
from manyhands.servers.protocol.parts import told
from manyhands.servers.protocol.scheme import Scheme, describe, elastic_scheme
from manyhands.servers.protocol.server_group import ServerGroup, own_server_group, server_group_of_part
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.local_socket import LocalPort
from manyhands.servers.transport.meeting import publish_server, read, worker_key


def prepare(context: ServerContext, out: Path | None) -> None:
    """Before the first session of a process that serves."""
    rank_info = context.rank_info
    # PyTorch may have been loaded when this still said how many a worker has.
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    name = rank_info.number if rank_info.address else rank_info.server
    if out:
        telemetry.open(out / "events" / f"server-{name}.jsonl", rank=rank_info.rank)
        telemetry.event("serves", server=name)


def be_a_server(
    context: ServerContext,
    model: nn.Module,
    optimizer: Optimizer,
    service: Service,
    *,
    survives: bool,
    peers: Sequence[Sequence[int]] = (),
    contexts: Callable[[], Iterator[ServerContext]],
    session: int = 0,
) -> Callable[[], None]:
    """What serves this session until all workers have left it, to be called in a thread of its own.

    Where replicas are in parts, `peers` are the workers that have the same part. Where hosts come and go, `contexts`
    are this server's, in one generation after the other.
    """
    rank_info, rule = context.rank_info, service.rule
    if rank_info.address:
        lots = elastic_scheme(model, optimizer)
        return lambda: serve_elastically(contexts(), model, optimizer, lots, service, session=session)
    if peers:
        group = server_group_of_part(rank_info, context.neighbours, peers).of_session(session)
        held, servers = told(group, context.arena), group.rank_info.servers
    else:
        group = own_server_group(rank_info, context.neighbours, rule.server_groups).of_session(session)
        held, servers = None, rank_info.servers // rule.server_groups
    scheme = describe(model, optimizer, servers, every=service.every_of, held=held)
    return lambda: serve(context, model, optimizer, scheme, service, server_group=group, survives=survives)


def serve(
    context: ServerContext,
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    service: Service,
    *,
    server_group: ServerGroup | None = None,
    survives: bool = False,
) -> None:
    """Be a server of the run, until all workers have said goodbye; the server group is the rule's, if not given."""
    group = server_group or own_server_group(
        context.rank_info, context.neighbours, service.rule.server_groups
    )
    position = ServerPosition(group, scheme, service, context.arena)
    # A server group among several has three vectors more, for the exchange.
    vectors = 1 + len(position.local_workers) + len(scheme.states) + 3 * (group.count > 1)
    position.require_memory(vectors)
    known = dict(zip(*trained(model, optimizer), strict=True))
    if position.memory.params.device != next(iter(known.values())).device:
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    given = {
        place.name: _given(optimizer, known[place.name], scheme.pieces.get(place.name))
        for place in scheme.layout.places
    }
    dispatcher = serve_from_start(position, optimizer, given, survives=survives)
    server = _listening(position, dispatcher, survives=survives)
    try:
        server.run()
    finally:
        server.close()


def _listening(position: ServerPosition, dispatcher: Dispatcher, *, survives: bool) -> Server:
    """The server with all its ports, once every process that it needs can reach it."""
    index, group, workers = position.index, position.group, position.workers
    local = position.local_workers | {group.peer_number(number) for number in group.local_peers}
    peers = [group.peer_number(number) for number in group.others]
    ports: list[Port] = [LocalPort(position.memory, index, peers)] if local else []
    remote = {worker_key(rank): rank for rank in workers if rank not in local}
    remote |= {peer_key(index, peer): peer for peer in peers[: group.number] if peer not in local}
    store, port = group.neighbours.store, None
    if remote:
        from manyhands.servers.transport.tcp import TcpPort, make_keys

        keys, meeting = make_keys(), group.rank_info.store
        port = TcpPort(address_towards(meeting.rpartition(":")[0] if meeting else "127.0.0.1"), keys)
        publish_server(store, index, port.endpoint, keys[0])
        ports.append(port)
    peer_port = visit(group, position.arena, position.scheme)
    if port:
        port.allow({read(store, key): number for key, number in remote.items()})
    participants = Participants(workers=frozenset(workers), local=frozenset(local), peers=frozenset(peers))
    return Server(
        dispatcher, ports, peer_port, participants, digest=position.scheme.digest, survives=survives
    )


def _given(optimizer: Optimizer, param: Tensor, piece: TensorSlice | None) -> dict[str, Any]:
    """The state that the user's optimizer has for a parameter, or for a piece of it."""
    return {
        name: piece.of(value)
        if piece and isinstance(value, Tensor) and tuple(value.shape) == piece.shape
        else value
        for name, value in optimizer.state.get(param, {}).items()
    }
