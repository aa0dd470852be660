"""A session whose parameters are on servers: both ends of it, its state in checkpoints, and what it reports."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import safetensors.torch as safetensors
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.cluster.worker.rank_info import RankInfo
from manyhands.cluster.worker.world import ServerContext, World
from manyhands.comm.comm import Comm, ServerAccess
from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost, ServersLost, UsageError
from manyhands.replica.part import Part
from manyhands.replica.replica import Loss, Replica
from manyhands.replica.server_memory import ServerMemory
from manyhands.replica.state import packing
from manyhands.replica.state.state import NUMBER, TENSOR, VECTOR, States, load_model, spread
from manyhands.servers.process.elastic_server import roam
from manyhands.servers.protocol.messages import ServerReport
from manyhands.servers.protocol.ownership import LOTS
from manyhands.servers.protocol.parts import outline, tell, told
from manyhands.servers.protocol.scheme import Scheme, describe
from manyhands.servers.protocol.server_group import deserted_parties, own_party, party_of_part
from manyhands.servers.protocol.service import Service
from manyhands.servers.transport.joining import connect, ordinary, own_vectors, serve
from manyhands.servers.worker.cache import HostServers
from manyhands.servers.worker.client import Reconciled, Servers


def be_a_server(
    context: ServerContext,
    model: nn.Module,
    optimizer: Optimizer,
    service: Service,
    clip_norm: float | None,
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
        scheme = _scheme_anywhere(model, optimizer)
        copies = service.copies
        roam(contexts(context), model, optimizer, scheme, rule, copies=copies, clip_norm=clip_norm)
        if out:
            telemetry.close()
        raise SystemExit(0)
    party = party_of_part(rank_info, context.neighbours, peers) if peers else None
    held = told(party, context.arena) if party else None
    servers = party.rank_info.servers if party else rank_info.servers // rule.parties
    scheme = describe(model, optimizer, servers, every=service.every_of, held=held)
    serve(
        context,
        model,
        optimizer,
        scheme,
        rule,
        party=party,
        clip_norm=clip_norm,
        cached=service.cached,
        survives=survives,
    )
    if out:
        telemetry.close()
    raise SystemExit(0)


def join(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    world: World,
    service: Service,
    clip_norm: float | None,
    *,
    has_begun: bool,
    arena: Arena | None = None,
    part: Part | None = None,
    peers: Sequence[Sequence[int]] = (),
) -> tuple[Replica, Comm, Servers | None]:
    """A worker's replica, whose updates the servers make, and the connection with them of those who have one.

    Where the strategy has a cache, the first worker of each host speaks for all of them. Where replicas are in parts,
    this one's is `part`, the world is that of those who have the same, and `arena` the memory that all have.
    """
    if world.comm.servers is not None:
        raise UsageError("servers serve one session: a script that uses them can make only one")
    if next(model.parameters()).device.type != "cpu":
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    rule, cached = service.rule, service.cached
    if part:
        party = party_of_part(world.rank_info, world.neighbours, peers)
    else:
        party = own_party(world.rank_info, world.neighbours, rule.parties)
    rank, servers = party.rank_info.rank, party.rank_info.servers
    held = outline(part, optimizer) if part else None
    if party.rank_info.address:
        _check_servers(party.rank_info, service, has_begun=has_begun)
        scheme = _scheme_anywhere(model, optimizer).assigned(party, service.copies)
    else:
        scheme = describe(model, optimizer, servers, every=service.every_of, held=held)
    host, arena = world.host, arena or world.host.arena
    if held and rank == 0:
        tell(party, arena, held)
    speaker, allocate = (host.ranks[0], host.allocate) if cached else (rank, ordinary)
    vectors = own_vectors(party, arena, scheme, rule, speaker, allocate)
    line = None
    if rank == speaker:
        line = connect(party, arena, scheme, rule, vectors, clip_norm, host.check_peers, cached=cached)
        if world.rank == 0:
            deserted = [] if part else deserted_parties(world.rank_info, world.neighbours, rule.parties)
            line.deserted = [
                connect(other, arena, scheme, rule, vectors, check=host.check_peers) for other in deserted
            ]
    server_memory = ServerMemory(
        layout=scheme.layout,
        params=vectors.params,
        grads=vectors.grads,
        # What servers of this host own may be changing as we come.
        fills=(rank == 0 and not has_begun) or (line is not None and not line.in_place),
    )
    replica = Replica(
        model,
        optimizer,
        loss,
        host=host if cached else None,
        lanes=servers,
        server_memory=server_memory,
        part=part,
    )
    if line is not None:
        line.bind(replica)
    world.comm.servers = HostServers(host, line, lockstep=rule.gathers) if cached else line
    try:
        if has_begun and line is not None and line.roam:
            _level(line, replica, world, service)
        elif has_begun:
            _resolve(line, replica, world)
        else:
            _begin(line, replica, world)
    except PeerLost:
        if line is not None:
            line.drop()
        raise
    return replica, world.comm, line


def _resolve(line: Servers | None, replica: Replica, world: World) -> None:
    """The servers have the parameters; see that all have made the same steps, and take over what they have."""
    assert world.comm.servers is not None
    _spread(replica, world)
    rounds = line.resolve() if line and line.leads else 0
    world.comm.servers.go_on(int(world.exchange([float(rounds)])[0][0]))
    world.comm.sum_of(0.0)


def _level(line: Servers, replica: Replica, world: World, service: Service) -> None:
    """The same where servers come and go: those that are there now get what those before them had."""
    _spread(replica, world)
    said = msgspec.json.encode(line.level()) if world.rank == 0 else b""
    found = msgspec.json.decode(world.gather(said)[0], type=Reconciled)
    if found.lost:
        raise _lost(found.lost / replica.layout.length, service)
    line.levelled = found
    line.go_on(found.rounds)
    world.comm.sum_of(0.0)


def _scheme_anywhere(model: nn.Module, optimizer: Optimizer) -> Scheme:
    """The same however many servers there are."""
    scheme = describe(model, optimizer, LOTS)
    if any(place.rows for place in scheme.layout.places):
        raise UsageError(
            "servers on hosts that come and go cannot keep tables of which only some rows travel; use sparse=False, "
            "or torchrun, mpirun or Slurm instead of --hosts"
        )
    return scheme


def _check_servers(rank_info: RankInfo, service: Service, *, has_begun: bool) -> None:
    hosts = len(set(rank_info.hosts[rank_info.workers :]))
    if not hosts:
        raise _lost(1.0, service)
    if hosts <= service.copies and not has_begun:  # later it does what it can
        raise UsageError(
            f"copies={service.copies} needs servers on 2 hosts, and all are on {hosts}; give --servers 1 to the "
            "launchers that join as well, or leave copies out"
        )


def _lost(part: float, service: Service) -> ServersLost:
    how = (
        "and so are the copies of them"
        if service.copies
        else "and with copies=0 nobody else has them; with copies=1 a server on another host has them too"
    )
    return ServersLost(
        f"{part:.0%} of the parameters were on servers that are gone, {how}: go on from the last checkpoint "
        "(--resume, or session.resume in a script)"
    )


def used_by(line: Servers, world: World, before: World, progress: int, *, was_here: bool) -> list[int] | None:
    """How far each worker of the generation `before` had come with its data, as far as updates tell that count; None
    where nobody of it has made any. Who is still here knows it best: what it was making it makes again."""
    rows = world.exchange(
        [float(before.rank if was_here else -1), float(before.rank_info.generation), float(progress)]
    )
    found = line.levelled
    if found is None or found.used_in != before.rank_info.generation:
        return None
    here = {int(row[0]): int(row[2]) for row in rows if row[0] >= 0 and row[1] == before.rank_info.generation}
    return [here.get(rank, found.used.get(rank, 0)) for rank in range(before.size)]


def go_on(servers: ServerAccess, before: ServerAccess | None, world: World, *, counts: bool) -> None:
    """A generation begins: workers keep what they kept back in the one before; `counts` is whether a step that was
    under way then is not made again."""
    if isinstance(servers, Servers):
        if isinstance(before, Servers):
            servers.take_over(before, counts=counts)
        servers.keep_step(world.exchange(servers.steps_kept))
    elif isinstance(servers, HostServers):
        servers.take_over(before if isinstance(before, HostServers) else None)


def _spread(replica: Replica, world: World) -> None:
    """What servers do not have; the workers of a host may have it in common."""
    shared = isinstance(world.comm.servers, HostServers)
    spread(replica, world.between_hosts() if shared else world.comm, world)


def _begin(line: Servers | None, replica: Replica, world: World) -> None:
    """Worker 0's parameters become the servers', and theirs everyone's."""
    assert world.comm.servers is not None
    _spread(replica, world)
    params = replica.params
    if line is not None and line.parties > 1:
        params = params.clone()  # workers that have the same servers may have the same memory
        world.comm.copy_(params)
    if line is not None and line.leads:
        line.put("params", params)
        if line.roam:
            line.copy()
    world.comm.sum_of(0.0)
    world.comm.servers.pull()
    world.comm.sum_of(0.0)


# Checkpoints


def collect(line: Servers | None, replica: Replica, world: World) -> tuple[dict[str, Tensor], States]:
    """The optimizer's state from all servers, on worker 0."""
    tensors: dict[str, Tensor] = {}
    states: States = {}
    if world.rank == 0:
        assert line is not None
        vectors: dict[str, Tensor] = {}
        known: dict[str, dict[str, Any]] = {}
        for part in line.states():
            for param, values in packing.unpack(part).items():
                known.setdefault(param, {}).update(values)
        for place in replica.layout.places:
            for name, value in known.get(place.name, {}).items():
                kind = VECTOR if value is None else TENSOR if isinstance(value, Tensor) else NUMBER
                states.setdefault(place.name, {})[name] = [kind, value if kind == NUMBER else None]
                if kind == VECTOR:
                    if name not in vectors:
                        vectors[name] = line.vector(name)
                    value = vectors[name][place.start : place.stop].view(place.shape)
                if kind != NUMBER:
                    tensors[f"optimizer/{place.name}/{name}"] = value
    world.comm.sum_of(0.0)
    return tensors, states


def distribute(
    line: Servers | None, replica: Replica, world: World, tensors: Mapping[str, Tensor], states: States
) -> None:
    """The inverse: worker 0 has read a checkpoint, the servers take it over; of several server groups, each of them."""
    if world.rank == 0:
        load_model(replica, tensors)
    if line is not None and line.parties > 1:
        optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
        tensors = safetensors.load(world.gather(safetensors.save(optimizer))[0])
    if line is not None and line.leads:
        values: dict[str, dict[str, Any]] = {}
        vectors: dict[str, Tensor] = {}
        for place in replica.layout.places:
            for name, (kind, number) in states.get(place.name, {}).items():
                saved = tensors.get(f"optimizer/{place.name}/{name}")
                if kind == VECTOR and saved is not None:
                    vector = vectors.setdefault(name, torch.zeros_like(replica.params))
                    vector[place.start : place.stop] = saved.view(-1)
                values.setdefault(place.name, {})[name] = {VECTOR: None, NUMBER: number}.get(kind, saved)
        for name, vector in vectors.items():
            line.put(name, vector)
        line.restore(packing.pack(values))
    _begin(line, replica, world)


# Reports


def report(line: Servers | None, world: World) -> list[ServerReport]:
    """What the servers have counted, the same on all workers."""
    found = line.reports() if line is not None and line.leads else []
    everyone = world.gather(msgspec.json.encode(found))
    return [one for found in everyone for one in msgspec.json.decode(found, type=list[ServerReport])]


def staleness(reports: list[ServerReport]) -> dict[str, Any]:
    """How many updates by others came between reading parameters and applying the gradient computed on them."""
    counts: Counter[int] = Counter()
    for one in reports:
        counts.update(one.staleness)
    updates = counts.total()
    return {
        "mean": round(sum(stale * times for stale, times in counts.items()) / updates, 3) if updates else 0.0,
        "max": max(counts, default=0),
        "histogram": {str(stale): counts[stale] for stale in sorted(counts)},
    }
