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

from manyhands.cluster.world import Station
from manyhands.comm.transports.arena import Arena, require_memory
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.updates import Updates
from manyhands.servers.client import Line
from manyhands.servers.consistency import Clocks, Rule
from manyhands.servers.guests import LinePort
from manyhands.servers.holding import Holding
from manyhands.servers.joining import computes_in_place, read, speakers, write
from manyhands.servers.messages import Hello, encode
from manyhands.servers.near import NearPort
from manyhands.servers.party import Party, own_party
from manyhands.servers.scheme import Scheme
from manyhands.servers.server import Port, Server
from manyhands.servers.shard import Shard


def roam(
    stations: Iterator[Station],
    model: nn.Module,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Rule,
    *,
    copies: int,
    clip_norm: float | None,
) -> None:
    """Be a server, until all workers have said goodbye or there are no more stations."""
    holding: Holding | None = None
    shard: Shard | None = None
    for station in stations:
        party = own_party(station.seat, station.neighbours, 1)
        if holding is None:
            # Stations are closed with their generations, and what the server has stays.
            lasting = Arena(os.dup(station.arena.fd))
            holding = _holding(lasting, party, model, optimizer, scheme, rule)
        try:
            shard = _shard(station, party, optimizer, scheme, rule, holding, copies, clip_norm, shard)
            server = _server(station, party, scheme, copies, shard)
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
    arena: Arena, party: Party, model: nn.Module, optimizer: Optimizer, scheme: Scheme, rule: Rule
) -> Holding:
    seat, length = party.seat, scheme.layout.length
    ranks = party.neighbours.beside(seat.rank)
    if seat.rank == next(rank for rank in ranks if rank >= seat.workers):
        near = sum(rank < seat.workers for rank in ranks)
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
    return Holding(scheme.groups, optimizer, updates, memory.params, goes_back=rule.gathers)


def _shard(
    station: Station,
    party: Party,
    optimizer: Optimizer,
    scheme: Scheme,
    rule: Rule,
    holding: Holding,
    copies: int,
    clip_norm: float | None,
    before: Shard | None,
) -> Shard:
    seat, memory = party.seat, scheme.memory(station.arena, party)
    assert seat.server is not None
    holding.begin_generation(seat.generation, follows=station.follows)
    workers = speakers(party, cached=False)
    near = set(party.neighbours.beside(seat.rank)).intersection(workers)
    return Shard(
        seat.server,
        scheme.assigned(party, copies).groups,
        scheme.layout.places,
        optimizer,
        holding.updates,
        holding.vectors["params"],
        Clocks(rule, workers, in_place=bool(near)),
        versions=memory.versions(len(scheme.groups)),
        near_grads=memory.grads,
        awaits_scale=clip_norm is not None and rule.gathers,
        copies=[rank for rank in workers if not computes_in_place(rank, party, rule)],
        holding=holding,
        copier=lambda server: _copier(party, server),
        before=before,
    )


def _copier(party: Party, server: int) -> int:
    """By which number a server is known to one that forwards updates to it; one that comes to us has its rank."""
    return party.seat.size + party.seat.workers + server


def _server(station: Station, party: Party, scheme: Scheme, copies: int, shard: Shard) -> Server:
    seat, index = party.seat, party.seat.server
    assert index is not None
    ranks = party.neighbours.beside(seat.rank)
    workers = speakers(party, cached=False)
    near = set(ranks).intersection(workers)
    groups = scheme.assigned(party, copies).groups
    owners = {seat.workers + group.server for group in groups if group.copy == index}
    targets = sorted({group.copy for group in groups if group.server == index and group.copy is not None})
    ports: list[Port] = []
    lines: dict[int, Line] = {}
    with contextlib.ExitStack() as stack:
        if near:
            ports.append(NearPort(scheme.memory(station.arena, party), index))
            stack.callback(ports[0].close)
        far = [rank for rank in workers if rank not in near] + sorted(owners)
        if far or targets:
            from manyhands.servers.wire import WireLine, WirePort, make_keys

            assert seat.address is not None
            store, keys = party.neighbours.store, make_keys()
            port = WirePort(seat.address, keys)
            ports.append(port)
            stack.callback(port.close, linger=False)
            write(store, f"worker-key/{seat.rank}", keys[0].decode())
            write(store, f"server/{index}", json.dumps([port.endpoint, keys[0].decode()]))
            for target in targets:
                endpoint, key = json.loads(read(store, f"server/{target}"))
                line = WireLine(target, endpoint, key.encode(), keys)
                stack.callback(line.close, linger=False)
                line.send(encode(Hello(number=1, worker=seat.rank, digest=scheme.digest)))
                lines[_copier(party, target)] = line
            port.allow({read(store, f"worker-key/{rank}"): rank for rank in far})
        stack.pop_all()
    return Server(
        shard,
        ports,
        near=near,
        workers=workers,
        guests=(),
        lines=LinePort(lines, lines.__getitem__),  # a loss ends the generation: nobody is reached again
        digest=scheme.digest,
        peers={*owners, *lines},
        check=station.check,
        generation=seat.generation,
    )
