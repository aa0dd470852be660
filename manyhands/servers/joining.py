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

from manyhands.cluster.addresses import address_towards
from manyhands.cluster.world import Station
from manyhands.comm.transports.arena import Arena, require_memory
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.parameters import trained
from manyhands.replica.piece import Piece
from manyhands.replica.updates import Updates
from manyhands.servers.client import Line, Servers
from manyhands.servers.consistency import Clocks, Rule
from manyhands.servers.cupboard import Cupboard
from manyhands.servers.diary import MOST_NOTED, Diary, Notes
from manyhands.servers.exchange import make_exchange
from manyhands.servers.guests import guest_key, visit
from manyhands.servers.near import NearLine, NearPort
from manyhands.servers.party import Party, own_party
from manyhands.servers.scheme import Scheme
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


def near_servers(rank: int, party: Party) -> list[int]:
    """The servers on a worker's host."""
    seat, ranks = party.seat, party.neighbours.beside(rank)
    return [server for server in range(seat.servers) if seat.workers + server in ranks]


def own_vectors(
    party: Party,
    arena: Arena,
    scheme: Scheme,
    rule: Rule,
    speaker: int,
    allocate: Callable[[int, torch.dtype], Tensor],
) -> Vectors:
    """The vectors of the worker that speaks with the servers: this one, or another of its host for it."""
    rank, memory = party.seat.rank, scheme.memory(arena, party)
    length, dtype = scheme.layout.length, scheme.dtype
    return Vectors(
        params=memory.params if computes_in_place(rank, party, rule) else allocate(length, dtype),
        grads=memory.grads(speaker) if near_servers(rank, party) else allocate(length, dtype),
    )


def computes_in_place(rank: int, party: Party, rule: Rule) -> bool:
    """Whether a worker's parameters are the very memory that servers update: all of them are on its host."""
    return len(near_servers(rank, party)) == party.seat.servers and not rule.fetches


def speakers(party: Party, cached: bool) -> tuple[int, ...]:
    """The workers that speak with the servers: all, or the first of each host for the others."""
    hosts = party.neighbours.workers(party.seat)
    return tuple(rank for ranks in hosts for rank in (ranks[:1] if cached else ranks))


def connect(
    party: Party,
    arena: Arena,
    scheme: Scheme,
    rule: Rule,
    vectors: Vectors,
    clip_norm: float | None = None,
    check: Callable[[], None] = lambda: None,
    *,
    cached: bool = False,
) -> Servers:
    """A worker's end; every server must be starting as well. `check` is called while waiting, and may raise."""
    seat, neighbours = party.seat, party.neighbours
    near = near_servers(seat.rank, party)
    memory = scheme.memory(arena, party) if near else None
    lines: list[Line] = []
    if len(near) < seat.servers:
        from manyhands.servers.wire import WireLine, make_keys  # a run on one host does without ZeroMQ

        keys = make_keys()
        write(neighbours.store, f"worker-key/{seat.rank}", keys[0].decode())
    try:
        for server in range(seat.servers):
            if memory is not None and server in near:
                lines.append(NearLine(memory, server, check))
            else:
                endpoint, key = json.loads(read(neighbours.store, f"server/{server}"))
                lines.append(WireLine(server, endpoint, key.encode(), keys, check))
    except PeerLost:
        for line in lines:
            line.close(linger=False)
        raise
    return Servers(
        seat.rank,
        lines,
        scheme.groups,
        rule,
        params=vectors.params,
        grads=vectors.grads,
        common=memory.vector if memory else None,
        versions=memory.versions(len(scheme.groups)) if memory else None,
        near=near,
        in_place=computes_in_place(seat.rank, party, rule),
        clip_norm=clip_norm,
        digest=scheme.digest,
        generation=seat.generation,
        workers=len(speakers(party, cached)),
        notes=Notes(memory) if memory is not None and seat.members and not seat.address else None,
        roam=seat.address is not None,
        cupboard=Cupboard(memory, scheme.groups) if memory is not None and seat.members and cached else None,
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
    station: Station,
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Rule,
    *,
    party: Party | None = None,
    clip_norm: float | None = None,
    cached: bool = False,
    survives: bool = False,
) -> None:
    """Be a server of the run, until all workers have said goodbye; the `party` is that of the rule, if not given."""
    party = party or own_party(station.seat, station.neighbours, rule.parties)
    server = _server(station, party, model, optimizer, scheme, rule, clip_norm, cached, survives)
    try:
        server.run()
    finally:
        server.close()


def _server(
    station: Station,
    party: Party,
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Rule,
    clip_norm: float | None,
    cached: bool,
    survives: bool,
) -> Server:
    seat, neighbours = party.seat, party.neighbours
    index = seat.server
    assert index is not None
    ranks = neighbours.beside(seat.rank)
    workers = speakers(party, cached)
    near = set(ranks).intersection(workers)
    length = scheme.layout.length
    if seat.rank == next(rank for rank in ranks if rank >= seat.workers):
        vectors = 1 + len(near) + len(scheme.states) + 3 * (party.count > 1)
        require_memory(
            vectors * length * scheme.dtype.itemsize, "parameters, optimizer state and the workers' gradients"
        )
    memory = scheme.memory(station.arena, party)
    params = memory.params
    known = dict(zip(*trained(model, optimizer), strict=True))
    if params.device != next(iter(known.values())).device:
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    # Another can go on if this one dies, where all that it knows is in common memory.
    is_here = len(near) == len(workers) and seat.rows <= MOST_NOTED and len(party.near) == len(party.others)
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
        diary = Diary(
            memory,
            scheme.layout,
            changed,
            updates.numbers,
            optimizer,
            servers=seat.servers,
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
        exchange=make_exchange(party, station.arena, scheme, rule.exchange_every, memory, is_kept=is_kept),
        diary=diary,
    )
    if diary is not None and diary.has_begun:
        shard.take_over()
    elif diary is not None:
        diary.begin()
    near |= {party.guest(number) for number in party.near}
    guests = [party.guest(number) for number in party.others]
    ports: list[Port] = [NearPort(memory, index, guests)] if near else []
    far = {f"worker-key/{rank}": rank for rank in workers if rank not in near}
    far |= {guest_key(index, guest): guest for guest in guests[: party.number] if guest not in near}
    port = None
    if far:
        from manyhands.servers.wire import WirePort, make_keys

        keys = make_keys()
        towards = seat.store.rpartition(":")[0] if seat.store else "127.0.0.1"
        port = WirePort(address_towards(towards), keys)
        neighbours.store.set(f"server/{index}", json.dumps([port.endpoint, keys[0].decode()]))
        ports.append(port)
    lines = visit(party, station.arena, scheme)
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


def _given(optimizer: Optimizer, param: Tensor, piece: Piece | None) -> dict[str, Any]:
    """The state that the user's optimizer has for a parameter, or for a piece of it."""
    return {
        name: piece.of(value)
        if piece and isinstance(value, Tensor) and tuple(value.shape) == piece.shape
        else value
        for name, value in optimizer.state.get(param, {}).items()
    }
