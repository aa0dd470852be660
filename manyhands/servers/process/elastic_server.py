"""A parameter server in an elastic multi-host run: it rejoins every generation and keeps its state.

In each generation it has another place among the servers, other workers, and perhaps other groups. Workers of its host
reach it through the host's memory, all others over TCP.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.optim import Optimizer

from manyhands.cluster.worker.server_context import ServerContext
from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.optimizer.updates import Updates
from manyhands.servers.process.backup import Backup
from manyhands.servers.process.dispatcher import Dispatcher
from manyhands.servers.process.participants import Participants
from manyhands.servers.process.peer_servers import PeerPort
from manyhands.servers.process.server import Port, Server
from manyhands.servers.process.server_position import ServerPosition
from manyhands.servers.process.shard_building import serve_a_generation
from manyhands.servers.process.update_counters import UpdateCounters
from manyhands.servers.protocol.messages import Hello, encode
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup, own_server_group
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.connection import Connection
from manyhands.servers.transport.local_socket import LocalPort
from manyhands.servers.transport.meeting import find_server, publish_server, read, worker_key, write


def serve_elastically(
    contexts: Iterator[ServerContext],
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    service: Service,
    *,
    session: int = 0,
) -> None:
    """Serve one generation after the other, until all workers have said goodbye or there is no more context."""
    first = next(contexts)
    # The first context's memory is closed with its generation, and the server keeps what it has.
    lasting, group = Arena(os.dup(first.arena.fd)), _group_of(first, session)
    backup = _empty_backup(ServerPosition(group, scheme, service, lasting), model, optimizer)
    counters = UpdateCounters()
    for context in itertools.chain([first], contexts):
        group = _group_of(context, session)
        backup.begin_generation(context.rank_info.generation, follows=context.follows)
        counters.begin_generation()
        position = ServerPosition(group, scheme.assigned(group, service.copies), service, context.arena)
        try:
            number_of = partial(_number_of, group)
            dispatcher = serve_a_generation(position, optimizer, backup, counters, number_of)
            server = _listening(position, dispatcher, context)
        except PeerLost:
            continue  # the generation is over
        try:
            server.run()
        except PeerLost:
            server.close(linger=False)
        else:
            server.close()
            return


def _group_of(context: ServerContext, session: int) -> ServerGroup:
    return own_server_group(context.rank_info, context.neighbours, 1).of_session(session)


def _empty_backup(position: ServerPosition, model: nn.Module, optimizer: Optimizer) -> Backup:
    scheme, gathers, memory = position.scheme, position.service.rule.gathers, position.memory
    position.require_memory((1 + len(scheme.states)) * (1 + gathers) + len(position.local_workers))
    if next(model.parameters()).device.type != "cpu":
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    updates = Updates(optimizer, scheme.layout, memory.params, allocate=memory.state, exact=False)
    return Backup(scheme.groups, optimizer, updates, memory.params, goes_back=gathers)


def _number_of(group: ServerGroup, server: int) -> int:
    """The number of a server to which this one sends updates; a server that sends them to us has its rank."""
    return group.rank_info.size + group.rank_info.workers + server


def _listening(position: ServerPosition, dispatcher: Dispatcher, context: ServerContext) -> Server:
    """The server with all its ports, once every process that it needs can reach it."""
    rank_info, index = position.group.rank_info, position.index
    local, groups = position.local_workers, position.scheme.groups
    owners = {rank_info.workers + group.server for group in groups if group.copy == index}
    targets = sorted({group.copy for group in groups if group.server == index and group.copy is not None})
    remote = [rank for rank in position.workers if rank not in local] + sorted(owners)
    ports: list[Port] = []
    connections: dict[int, Connection] = {}
    with contextlib.ExitStack() as stack:
        if local:
            ports.append(LocalPort(position.memory, index))
            stack.callback(ports[0].close)
        if remote or targets:
            from manyhands.servers.transport.tcp import TcpConnection, TcpPort, make_keys

            store, keys = position.group.neighbours.store, make_keys()
            port = TcpPort(rank_info.address or "127.0.0.1", keys)
            ports.append(port)
            stack.callback(port.close, linger=False)
            write(store, worker_key(rank_info.rank), keys[0].decode())
            publish_server(store, index, port.endpoint, keys[0])
            for target in targets:
                connection = TcpConnection(target, *find_server(store, target), keys)
                stack.callback(connection.close, linger=False)
                connection.send(encode(Hello(number=1, worker=rank_info.rank, digest=position.scheme.digest)))
                connections[_number_of(position.group, target)] = connection
            port.allow({read(store, worker_key(rank)): rank for rank in remote})
        stack.pop_all()
    participants = Participants(
        workers=frozenset(position.workers),
        local=frozenset(local),
        backups=frozenset([*owners, *connections]),
        generation=rank_info.generation,
    )
    return Server(
        dispatcher,
        ports,
        # A loss ends the generation, so the server reaches no process a second time.
        PeerPort(connections, connections.__getitem__),
        participants,
        digest=position.scheme.digest,
        check=context.check,
    )
