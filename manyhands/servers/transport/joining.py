"""How workers and servers find each other, and the two ends that come of it: `connect` and `serve`.

On one host they meet in its memory. Between hosts a server publishes its address and its public key at the run's
meeting place, and each worker its public key; secret keys stay where they were made.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.cluster.launchers.addresses import address_towards
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.comm.transports.arena import Arena, require_memory
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.optimizer.updates import Updates
from manyhands.replica.parameters import trained
from manyhands.replica.state.slice_of import TensorSlice
from manyhands.servers.process.exchange import make_exchange
from manyhands.servers.process.peer_servers import guest_key, visit
from manyhands.servers.process.server import Port, Server
from manyhands.servers.process.shard import Shard
from manyhands.servers.process.write_ahead_log import MOST_NOTED, Notes, WriteAheadLog
from manyhands.servers.protocol.consistency import Clocks, Consistency
from manyhands.servers.protocol.scheme import Scheme
from manyhands.servers.protocol.server_group import ServerGroup, own_party
from manyhands.servers.transport.local_socket import LocalConnection, LocalPort
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


def near_servers(rank: int, party: ServerGroup) -> list[int]:
    """The servers on a worker's host."""
    rank_info, ranks = party.rank_info, party.neighbours.beside(rank)
    return [server for server in range(rank_info.servers) if rank_info.workers + server in ranks]


def own_vectors(
    party: ServerGroup,
    arena: Arena,
    scheme: Scheme,
    rule: Consistency,
    speaker: int,
    allocate: Callable[[int, torch.dtype], Tensor],
) -> StartVectors:
    """The vectors of the worker that speaks with the servers: this one, or another of its host for it."""
    rank, memory = party.rank_info.rank, scheme.memory(arena, party)
    length, dtype = scheme.layout.length, scheme.dtype
    return StartVectors(
        params=memory.params if computes_in_place(rank, party, rule) else allocate(length, dtype),
        grads=memory.grads(speaker) if near_servers(rank, party) else allocate(length, dtype),
    )


def computes_in_place(rank: int, party: ServerGroup, rule: Consistency) -> bool:
    """Whether a worker's parameters are the very memory that servers update: all of them are on its host."""
    return len(near_servers(rank, party)) == party.rank_info.servers and not rule.fetches


def speakers(party: ServerGroup, cached: bool) -> tuple[int, ...]:
    """The workers that speak with the servers: all, or the first of each host for the others."""
    hosts = party.neighbours.workers(party.rank_info)
    return tuple(rank for ranks in hosts for rank in (ranks[:1] if cached else ranks))


def connect(
    party: ServerGroup,
    arena: Arena,
    scheme: Scheme,
    rule: Consistency,
    vectors: StartVectors,
    clip_norm: float | None = None,
    check: Callable[[], None] = lambda: None,
    *,
    cached: bool = False,
) -> Servers:
    """A worker's end; every server must be starting as well. `check` is called while waiting, and may raise."""
    rank_info, neighbours = party.rank_info, party.neighbours
    near = near_servers(rank_info.rank, party)
    memory = scheme.memory(arena, party) if near else None
    lines: list[Connection] = []
    if len(near) < rank_info.servers:
        from manyhands.servers.transport.tcp import (  # a run on one host does without ZeroMQ
            TcpConnection,
            make_keys,
        )

        keys = make_keys()
        write(neighbours.store, f"worker-key/{rank_info.rank}", keys[0].decode())
    try:
        for server in range(rank_info.servers):
            if memory is not None and server in near:
                lines.append(LocalConnection(memory, server, check))
            else:
                endpoint, key = json.loads(read(neighbours.store, f"server/{server}"))
                lines.append(TcpConnection(server, endpoint, key.encode(), keys, check))
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
        in_place=computes_in_place(rank_info.rank, party, rule),
        clip_norm=clip_norm,
        digest=scheme.digest,
        generation=rank_info.generation,
        workers=len(speakers(party, cached)),
        notes=Notes(memory) if memory is not None and rank_info.members and not rank_info.address else None,
        roam=rank_info.address is not None,
        cupboard=Accumulator(memory, scheme.groups)
        if memory is not None and rank_info.members and cached
        else None,
    )


def read(store: Any, key: str) -> bytes:
    """What someone has left, or will leave, where all meet."""
    with _meeting():
        found: bytes = store.get(key)
    return found


def write(store: Any, key: str, value: str) -> None:
    with _meeting():
        store.set(key, value)


@contextmanager
def _meeting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the place where all meet is gone ({str(error).splitlines()[0]})") from error


def serve(
    context: ServerContext,
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Consistency,
    *,
    party: ServerGroup | None = None,
    clip_norm: float | None = None,
    cached: bool = False,
    survives: bool = False,
) -> None:
    """Be a server of the run, until all workers have said goodbye; the `party` is that of the rule, if not given."""
    party = party or own_party(context.rank_info, context.neighbours, rule.parties)
    server = _server(context, party, model, optimizer, scheme, rule, clip_norm, cached, survives)
    try:
        server.run()
    finally:
        server.close()


def _server(
    context: ServerContext,
    party: ServerGroup,
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Consistency,
    clip_norm: float | None,
    cached: bool,
    survives: bool,
) -> Server:
    rank_info, neighbours = party.rank_info, party.neighbours
    index = rank_info.server
    assert index is not None
    ranks = neighbours.beside(rank_info.rank)
    workers = speakers(party, cached)
    near = set(ranks).intersection(workers)
    length = scheme.layout.length
    if rank_info.rank == next(rank for rank in ranks if rank >= rank_info.workers):
        vectors = 1 + len(near) + len(scheme.states) + 3 * (party.count > 1)
        require_memory(
            vectors * length * scheme.dtype.itemsize, "parameters, optimizer state and the workers' gradients"
        )
    memory = scheme.memory(context.arena, party)
    params = memory.params
    known = dict(zip(*trained(model, optimizer), strict=True))
    if params.device != next(iter(known.values())).device:
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    # Another can go on if this one dies, where all that it knows is in common memory.
    is_here = (
        len(near) == len(workers) and rank_info.rows <= MOST_NOTED and len(party.near) == len(party.others)
    )
    is_kept = survives and is_here
    if memory.had_a_server(index) and not is_kept:
        raise PeerLost(f"server {index} died, and nobody can go on with what it knew")
    updates = Updates(
        optimizer,
        scheme.layout,
        params,
        allocate=memory.state,
        common=memory if is_kept else None,
        exact=len(workers) == 1,
    )
    own = [span for group in scheme.groups if group.server == index for span in group.spans]
    diary = None
    if is_kept and updates.numbers is not None:
        changed = [params, *updates.vectors.values()]
        diary = WriteAheadLog(
            memory,
            scheme.layout,
            changed,
            updates.numbers,
            optimizer,
            servers=rank_info.servers,
            server=index,
        )
    if diary is None or not diary.has_begun:
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
        params,
        Clocks(rule, workers, in_place=bool(near)),
        versions=memory.versions(len(scheme.groups)),
        near_grads=memory.grads,
        awaits_scale=clip_norm is not None and rule.gathers,
        copies=[rank for rank in workers if not computes_in_place(rank, party, rule)],
        exchange=make_exchange(party, context.arena, scheme, rule.exchange_every, memory, is_kept=is_kept),
        diary=diary,
    )
    if diary is not None and diary.has_begun:
        shard.take_over()
    elif diary is not None:
        diary.begin()
    near |= {party.guest(number) for number in party.near}
    guests = [party.guest(number) for number in party.others]
    ports: list[Port] = [LocalPort(memory, index, guests)] if near else []
    far = {f"worker-key/{rank}": rank for rank in workers if rank not in near}
    far |= {guest_key(index, guest): guest for guest in guests[: party.number] if guest not in near}
    port = None
    if far:
        from manyhands.servers.transport.tcp import TcpPort, make_keys

        keys = make_keys()
        towards = rank_info.store.rpartition(":")[0] if rank_info.store else "127.0.0.1"
        port = TcpPort(address_towards(towards), keys)
        neighbours.store.set(f"server/{index}", json.dumps([port.endpoint, keys[0].decode()]))
        ports.append(port)
    lines = visit(party, context.arena, scheme)
    if port:
        port.allow({neighbours.store.get(key): number for key, number in far.items()})
    for param in model.parameters():
        param.data = torch.empty(0)  # its values come from worker 0, and live in the flat vector
    return Server(
        shard,
        ports,
        near=near,
        workers=workers,
        guests=guests,
        lines=lines,
        digest=scheme.digest,
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
