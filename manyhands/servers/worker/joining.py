"""A worker joins a run whose parameters are on servers: it connects, makes its replica, and takes over their values."""

from collections.abc import Sequence

import msgspec
from torch import nn
from torch.optim import Optimizer

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm, ServerAccess
from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost, ServersLost, UsageError
from manyhands.replica.part import Part
from manyhands.replica.replica import Loss, Replica
from manyhands.replica.server_memory import ServerMemory
from manyhands.replica.state.state import spread
from manyhands.servers.protocol.parts import outline, tell
from manyhands.servers.protocol.scheme import Scheme, describe, elastic_scheme
from manyhands.servers.protocol.server_group import (
    ServerGroup,
    orphaned_server_groups,
    own_server_group,
    server_group_of_part,
)
from manyhands.servers.protocol.service import Service
from manyhands.servers.worker.cache import HostServers
from manyhands.servers.worker.client import Reconciled, Servers
from manyhands.servers.worker.connecting import StartVectors, connect, ordinary, own_vectors


def join(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    world: World,
    service: Service,
    *,
    has_begun: bool,
    arena: Arena | None = None,
    part: Part | None = None,
    peers: Sequence[Sequence[int]] = (),
) -> tuple[Replica, Comm, Servers | None]:
    """A worker's replica, whose updates the servers make, and the connection with them of those who have one.

    Where the service has a cache, the first worker of each host speaks for all of them. Where replicas are in parts,
    this one's is `part`, the world is that of those who have the same, and `arena` the memory that all have.
    """
    if world.comm.servers is not None:
        raise UsageError("servers serve one session: a script that uses them can make only one")
    if next(model.parameters()).device.type != "cpu":
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    host, arena, rank_info = world.host, arena or world.host.arena, world.rank_info
    if part:
        group = server_group_of_part(rank_info, world.neighbours, peers)
    else:
        group = own_server_group(rank_info, world.neighbours, service.rule.server_groups)
    scheme = _scheme(model, optimizer, group, service, arena, part=part, has_begun=has_begun)
    rank = group.rank_info.rank
    speaker, allocate = (host.ranks[0], host.allocate) if service.cached else (rank, ordinary)
    vectors = own_vectors(group, arena, scheme, service.rule, speaker, allocate)
    line = None
    if rank == speaker:
        line = _connected(world, arena, group, scheme, service, vectors, is_whole=part is None)
    replica = Replica(
        model,
        optimizer,
        loss,
        host=host if service.cached else None,
        lanes=group.rank_info.servers,
        server_memory=ServerMemory(
            layout=scheme.layout,
            params=vectors.params,
            grads=vectors.grads,
            # What servers of this host own may be changing as we come.
            fills=(rank == 0 and not has_begun) or (line is not None and not line.in_place),
        ),
        part=part,
    )
    if line is not None:
        line.bind(replica)
    world.comm.servers = HostServers(host, line, lockstep=service.rule.gathers) if service.cached else line
    _start(line, replica, world, service, has_begun=has_begun)
    return replica, world.comm, line


def _scheme(
    model: nn.Module,
    optimizer: Optimizer,
    group: ServerGroup,
    service: Service,
    arena: Arena,
    *,
    part: Part | None,
    has_begun: bool,
) -> Scheme:
    """Where everything lies; the first worker that has a part tells the servers which part it is."""
    if group.rank_info.address:
        _check_servers(group.rank_info, service, has_begun=has_begun)
        return elastic_scheme(model, optimizer).assigned(group, service.copies)
    held = outline(part, optimizer) if part else None
    if held and group.rank_info.rank == 0:
        tell(group, arena, held)
    return describe(model, optimizer, group.rank_info.servers, every=service.every_of, held=held)


def _connected(
    world: World,
    arena: Arena,
    group: ServerGroup,
    scheme: Scheme,
    service: Service,
    vectors: StartVectors,
    *,
    is_whole: bool,
) -> Servers:
    """Connections with the servers of this worker's group; worker 0 has those with orphaned groups, too."""
    check = world.host.check_peers
    line = connect(group, arena, scheme, service, vectors, check)
    if world.rank == 0 and is_whole:
        others = orphaned_server_groups(world.rank_info, world.neighbours, service.rule.server_groups)
        plain = Service(rule=service.rule)
        line.orphaned = [connect(other, arena, scheme, plain, vectors, check) for other in others]
    return line


def _start(
    line: Servers | None, replica: Replica, world: World, service: Service, *, has_begun: bool
) -> None:
    """Give the servers the first parameters, or take over theirs."""
    try:
        if has_begun and line is not None and line.roam:
            _level(line, replica, world, service)
        elif has_begun:
            _resolve(line, replica, world)
        else:
            begin(line, replica, world)
    except PeerLost:
        if line is not None:
            line.drop()
        raise


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


def begin(line: Servers | None, replica: Replica, world: World) -> None:
    """Worker 0's parameters become the servers', and theirs everyone's."""
    assert world.comm.servers is not None
    _spread(replica, world)
    params = replica.params
    if line is not None and line.server_groups > 1:
        params = params.clone()  # workers that have the same servers may have the same memory
        world.comm.copy_(params)
    if line is not None and line.leads:
        line.put("params", params)
        if line.roam:
            line.copy()
    world.comm.sum_of(0.0)
    world.comm.servers.pull()
    world.comm.sum_of(0.0)
