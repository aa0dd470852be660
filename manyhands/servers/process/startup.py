"""A server process from its start to its end: it claims memory, opens its ports, and serves until all workers leave."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.cluster.launchers.addresses import address_towards
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.comm.transports.arena import Arena, require_memory
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.optimizer.updates import Updates
from manyhands.replica.parameters import trained
from manyhands.replica.state.slice_of import TensorSlice
from manyhands.servers.process.elastic_server import roam
from manyhands.servers.process.exchange import make_exchange
from manyhands.servers.process.peer_servers import guest_key, visit
from manyhands.servers.process.server import Port, Server
from manyhands.servers.process.shard import Shard
from manyhands.servers.process.write_ahead_log import MOST_NOTED, WriteAheadLog
from manyhands.servers.protocol.consistency import Clocks
from manyhands.servers.protocol.parts import told
from manyhands.servers.protocol.scheme import Scheme, describe, elastic_scheme
from manyhands.servers.protocol.server_group import ServerGroup, own_server_group, server_group_of_part
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.host_memory import HostMemory
from manyhands.servers.transport.local_socket import LocalPort
from manyhands.servers.transport.meeting import publish_server, read, worker_key


def be_a_server(
    context: ServerContext,
    model: nn.Module,
    optimizer: Optimizer,
    service: Service,
    *,
    out: Path | None,
    survives: bool,
    peers: Sequence[Sequence[int]] = (),
    contexts: Callable[[ServerContext], Iterator[ServerContext]] = lambda first: iter([first]),
) -> NoReturn:
    """Serve until the run ends, and end with it: a server has no more of the script to run.

    Where replicas are in parts, `peers` are the workers that have the same part. Where hosts come and go, `contexts`
    are this server's, in one generation after the other.
    """
    rank_info, rule = context.rank_info, service.rule
    # PyTorch may have been loaded when this still said how many a worker has.
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    name = rank_info.number if rank_info.address else rank_info.server
    if out:
        telemetry.open(out / "events" / f"server-{name}.jsonl", rank=rank_info.rank)
    if rank_info.address:
        scheme = elastic_scheme(model, optimizer)
        roam(
            contexts(context),
            model,
            optimizer,
            scheme,
            rule,
            copies=service.copies,
            clip_norm=service.clip_norm,
        )
    else:
        group = server_group_of_part(rank_info, context.neighbours, peers) if peers else None
        held = told(group, context.arena) if group else None
        servers = group.rank_info.servers if group else rank_info.servers // rule.server_groups
        scheme = describe(model, optimizer, servers, every=service.every_of, held=held)
        serve(context, model, optimizer, scheme, service, server_group=group, survives=survives)
    if out:
        telemetry.close()
    raise SystemExit(0)


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
    position = _Position(group, scheme, service, context.arena)
    position.require_memory()
    known = dict(zip(*trained(model, optimizer), strict=True))
    if position.memory.params.device != next(iter(known.values())).device:
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    shard = _shard(position, optimizer, known, is_kept=survives and position.can_be_replaced)
    server = _listening(position, shard, survives=survives)
    for param in model.parameters():
        param.data = torch.empty(0)  # its values come from worker 0, and live in the flat vector
    try:
        server.run()
    finally:
        server.close()


@dataclass(frozen=True)
class _Position:
    """One server among the processes of its server group and of its host."""

    group: ServerGroup
    scheme: Scheme
    service: Service
    arena: Arena

    @property
    def index(self) -> int:
        return self.group.own_server

    @cached_property
    def memory(self) -> HostMemory:
        return self.scheme.memory(self.arena, self.group)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that speak with this server."""
        return self.group.speakers(cached=self.service.cached)

    @property
    def local_workers(self) -> set[int]:
        return set(self.group.neighbours.beside(self.group.rank_info.rank)).intersection(self.workers)

    @property
    def can_be_replaced(self) -> bool:
        """Whether all that this server knows is in its host's memory, so that a new server can go on with it."""
        return (
            len(self.local_workers) == len(self.workers)
            and self.group.rank_info.rows <= MOST_NOTED
            and len(self.group.near) == len(self.group.others)
        )

    def require_memory(self) -> None:
        """The first server of each host asks whether the host has enough."""
        rank_info, scheme = self.group.rank_info, self.scheme
        ranks = self.group.neighbours.beside(rank_info.rank)
        if rank_info.rank == next(rank for rank in ranks if rank >= rank_info.workers):
            vectors = 1 + len(self.local_workers) + len(scheme.states) + 3 * (self.group.count > 1)
            require_memory(
                vectors * scheme.layout.length * scheme.dtype.itemsize,
                "parameters, optimizer state and the workers' gradients",
            )


def _shard(position: _Position, optimizer: Optimizer, known: Mapping[str, Tensor], *, is_kept: bool) -> Shard:
    """What this server owns; with `is_kept`, a new server can go on with it if this one dies."""
    index, group, scheme, rule = position.index, position.group, position.scheme, position.service.rule
    memory, workers = position.memory, position.workers
    if memory.had_a_server(index) and not is_kept:
        raise PeerLost(f"server {index} died, and nobody can go on with what it knew")
    updates = Updates(
        optimizer,
        scheme.layout,
        memory.params,
        allocate=memory.state,
        common=memory if is_kept else None,
        exact=len(workers) == 1,
    )
    diary = _log(position, optimizer, updates, memory) if is_kept else None
    if diary is None or not diary.has_begun:
        own = [span for one in scheme.groups if one.server == index for span in one.spans]
        names = [place.name for place in scheme.layout.places]
        updates.take_over(
            own, {name: _given(optimizer, known[name], scheme.pieces.get(name)) for name in names}
        )
    shard = Shard(
        index,
        scheme.groups,
        scheme.layout.places,
        optimizer,
        updates,
        memory.params,
        Clocks(rule, workers, in_place=bool(position.local_workers)),
        versions=memory.versions(len(scheme.groups)),
        near_grads=memory.grads,
        awaits_scale=position.service.clip_norm is not None and rule.gathers,
        copies=[rank for rank in workers if not group.computes_in_place(rank, rule)],
        exchange=make_exchange(group, position.arena, scheme, rule.exchange_every, memory, is_kept=is_kept),
        diary=diary,
    )
    if diary is not None and diary.has_begun:
        shard.take_over()
    elif diary is not None:
        diary.begin()
    return shard


def _log(
    position: _Position, optimizer: Optimizer, updates: Updates, memory: HostMemory
) -> WriteAheadLog | None:
    if updates.numbers is None:
        return None
    return WriteAheadLog(
        memory,
        position.scheme.layout,
        [memory.params, *updates.vectors.values()],
        updates.numbers,
        optimizer,
        servers=position.group.rank_info.servers,
        server=position.index,
    )


def _listening(position: _Position, shard: Shard, *, survives: bool) -> Server:
    """The server with all its ports, once every process that it needs can reach it."""
    index, group, workers = position.index, position.group, position.workers
    near = position.local_workers | {group.guest(number) for number in group.near}
    guests = [group.guest(number) for number in group.others]
    ports: list[Port] = [LocalPort(position.memory, index, guests)] if near else []
    remote = {worker_key(rank): rank for rank in workers if rank not in near}
    remote |= {guest_key(index, guest): guest for guest in guests[: group.number] if guest not in near}
    store, port = group.neighbours.store, None
    if remote:
        from manyhands.servers.transport.tcp import TcpPort, make_keys

        keys, meeting = make_keys(), group.rank_info.store
        port = TcpPort(address_towards(meeting.rpartition(":")[0] if meeting else "127.0.0.1"), keys)
        publish_server(store, index, port.endpoint, keys[0])
        ports.append(port)
    lines = visit(group, position.arena, position.scheme)
    if port:
        port.allow({read(store, key): number for key, number in remote.items()})
    return Server(
        shard,
        ports,
        near=near,
        workers=workers,
        guests=guests,
        lines=lines,
        digest=position.scheme.digest,
        survives=survives,
    )


def _given(optimizer: Optimizer, param: Tensor, piece: TensorSlice | None) -> dict[str, Any]:
    """The state that the user's optimizer has for a parameter, or for a piece of it."""
    return {
        name: piece.of(value)
        if piece and isinstance(value, Tensor) and tuple(value.shape) == piece.shape
        else value
        for name, value in optimizer.state.get(param, {}).items()
    }
