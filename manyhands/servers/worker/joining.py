"""A worker joins a run whose parameters are on servers: it connects, makes its replica, and takes over their values."""

from collections.abc import Sequence

import msgspec
from torch.optim import Optimizer

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm, ServerAccess
from manyhands.comm.transports.arena import Arena
from manyhands.errors import PeerLost, ServersLost, UsageError
from manyhands.replica.part import Part
from manyhands.replica.replica import Replica
from manyhands.replica.served import served_replica
from manyhands.replica.server_memory import ServerMemory
from manyhands.replica.state.state import spread
from manyhands.servers.protocol import served_sessions
from manyhands.servers.protocol.parts import outline, tell
from manyhands.servers.protocol.scheme import Scheme, describe, elastic_scheme
from manyhands.servers.protocol.server_group import (
    ServerGroup,
    orphaned_server_groups,
    own_server_group,
    server_group_of_part,
)
from manyhands.servers.protocol.service import Service
from manyhands.servers.worker.cache import HostServers, SpokenFor, UnsteppedHostServers
from manyhands.servers.worker.client import Servers
from manyhands.servers.worker.connecting import connect, ordinary, own_vectors, servers_of
from manyhands.servers.worker.reconcile import ElasticReconciliation, Reconciled, reconcile
from manyhands.servers.worker.server_connections import ServerConnections


def join(
    part: Part,
    optimizer: Optimizer,
    world: World,
    service: Service,
    *,
    has_begun: bool,
    arena: Arena,
    peers: Sequence[Sequence[int]] = (),
    session: int = 0,
) -> tuple[Replica, Comm, Servers | None]:
    """A worker's replica, whose updates the servers make, and the connection with them of those who have one.

    Where the service has a cache, the first worker of each host speaks for all of them. Where replicas are in parts,
    this one's is `part`, the world is that of those who have the same, and `arena` the memory that all have.
    """
    if session:
        served_sessions.require(session, world.neighbours, arena, world.host.check_peers)
    if next(part.model.parameters()).device.type != "cpu":
        raise UsageError("servers keep parameters in the host's memory; use --device cpu with them")
    host = world.host
    group = _server_group(world, service, peers if part.spread else None).of_session(session)
    scheme = _scheme(part, optimizer, group, service, arena, has_begun=has_begun)
    rank = group.rank_info.rank
    speaker, allocate = (host.ranks[0], host.allocate) if service.cached else (rank, ordinary)
    vectors = own_vectors(group, arena, scheme, service.rule, speaker, allocate)
    connections = None
    if rank == speaker:
        connections = connect(group, arena, scheme, cached=service.cached, check=host.check_peers)
    is_in_place = group.computes_in_place(rank, service.rule)
    # What servers of this host own may be changing as this worker comes.
    fills = (rank == 0 and not has_begun) or (rank == speaker and not is_in_place)
    memory = ServerMemory(
        scheme.layout, vectors.params, vectors.grads, fills, host if service.cached else None, arena
    )
    replica = served_replica(part, optimizer, memory, lanes=group.rank_info.servers)
    servers = None
    if connections is not None:
        servers = servers_of(group, arena, scheme, service, connections, vectors, replica)
        if world.rank == 0 and not part.spread:
            servers.orphaned = _orphaned(world, arena, scheme, service, session)
    world.comm.servers = _seen_by_worker(world, servers, service)
    _start(servers, replica, world, service, has_begun=has_begun)
    return replica, world.comm, servers


def _server_group(world: World, service: Service, peers: Sequence[Sequence[int]] | None) -> ServerGroup:
    """This worker's; where replicas are in parts, `peers` are the workers that have the same part."""
    if peers is not None:
        return server_group_of_part(world.rank_info, world.neighbours, peers)
    return own_server_group(world.rank_info, world.neighbours, service.rule.server_groups)


def _scheme(
    part: Part,
    optimizer: Optimizer,
    group: ServerGroup,
    service: Service,
    arena: Arena,
    *,
    has_begun: bool,
) -> Scheme:
    """Where everything lies; the first worker that has a part tells the servers which part it is."""
    if group.rank_info.address:
        _check_servers(group.rank_info, service, has_begun=has_begun)
        return elastic_scheme(part.model, optimizer).assigned(group, service.copies)
    held = outline(part, optimizer) if part.spread else None
    if held and group.rank_info.rank == 0:
        tell(group, arena, held)
    return describe(part.model, optimizer, group.rank_info.servers, every=service.every_of, held=held)


def _orphaned(
    world: World, arena: Arena, scheme: Scheme, service: Service, session: int
) -> list[ServerConnections]:
    """Connections with the server groups that have no worker left: worker 0 sees to them."""
    return [
        connect(group.of_session(session), arena, scheme, cached=False, check=world.host.check_peers)
        for group in orphaned_server_groups(world.rank_info, world.neighbours, service.rule.server_groups)
    ]


def _seen_by_worker(world: World, servers: Servers | None, service: Service) -> ServerAccess | None:
    """The servers as strategies see them on this worker."""
    if not service.cached:
        return servers
    variant = HostServers if service.rule.gathers else UnsteppedHostServers
    return variant(world.host, servers or SpokenFor())


def _start(
    servers: Servers | None, replica: Replica, world: World, service: Service, *, has_begun: bool
) -> None:
    """Give the servers the first parameters, or take over theirs."""
    try:
        if not has_begun:
            begin(servers, replica, world)
        elif servers is not None and servers.is_elastic:
            _reconcile_elastic(servers, replica, world, service)
        else:
            _reconcile(servers, replica, world)
    except PeerLost:
        if servers is not None:
            servers.drop()
        raise


def begin(servers: Servers | None, replica: Replica, world: World) -> None:
    """Worker 0's parameters become the servers', and theirs everyone's."""
    _spread(replica, world)
    params = replica.params
    if servers is not None and servers.server_groups > 1:
        params = params.clone()  # workers that have the same servers may have the same memory
        world.comm.copy_(params)
    if servers is not None and servers.leads:
        servers.put("params", params)
        if servers.is_elastic:
            ElasticReconciliation(servers.connections, servers.groups).copy()
    world.comm.sum_of(0.0)
    _served(world).pull()
    world.comm.sum_of(0.0)


def _reconcile(servers: Servers | None, replica: Replica, world: World) -> None:
    """The servers have the parameters: all make the same steps count, and this worker takes over what they have."""
    _spread(replica, world)
    rounds = 0
    if servers is not None and servers.leads:
        rounds = reconcile(servers.connections)
        for orphaned in servers.orphaned:
            reconcile(orphaned)
    _served(world).go_on(int(world.exchange([float(rounds)])[0][0]))
    world.comm.sum_of(0.0)


def _reconcile_elastic(servers: Servers, replica: Replica, world: World, service: Service) -> None:
    """Servers have come or gone: those of this generation get what those before them had."""
    _spread(replica, world)
    said = b""
    if world.rank == 0:
        elastic = ElasticReconciliation(servers.connections, servers.groups)
        said = msgspec.json.encode(elastic.reconcile(gathers=service.rule.gathers))
    found = msgspec.json.decode(world.gather(said)[0], type=Reconciled)
    if found.lost:
        raise _lost(found.lost / replica.layout.length, service)
    servers.reconciled = found
    servers.go_on(found.rounds)
    world.comm.sum_of(0.0)


def _served(world: World) -> ServerAccess:
    if world.comm.servers is None:
        raise UsageError("this run has no servers; start it with --servers 1")
    return world.comm.servers


def _spread(replica: Replica, world: World) -> None:
    """What servers do not have; the workers of a host may have it in common."""
    shared = isinstance(world.comm.servers, HostServers)
    spread(replica, world.between_hosts() if shared else world.comm, world)


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
        else "and with copies=0 no other server has them; with copies=1 a server on another host has them too"
    )
    return ServersLost(
        f"{part:.0%} of the parameters were on servers that are gone, {how}: go on from the last checkpoint "
        "(--resume, or session.resume in a script)"
    )


def used_by(
    servers: Servers, world: World, before: World, progress: Sequence[int], *, was_here: bool
) -> list[Sequence[int]] | None:
    """How far each worker of the generation `before` had come with each stream of its data, in updates that count; None
    where none of them has made any. A worker that is still here knows it best: it makes again what it was making."""
    generation = before.rank_info.generation
    rank = before.rank if was_here else -1
    rows = world.exchange([float(rank), float(generation), *(float(value) for value in progress)])
    found = servers.reconciled
    if found.used_in != generation:
        return None
    here = {
        int(row[0]): [int(value) for value in row[2:]] for row in rows if row[0] >= 0 and row[1] == generation
    }
    return [here.get(rank, found.used.get(rank, ())) for rank in range(before.size)]


def go_on(servers: ServerAccess, before: ServerAccess | None, world: World, *, counts: bool) -> None:
    """A generation begins: workers keep what they deferred in the one before; `counts` is whether a step that was
    in flight then is not made again."""
    if isinstance(servers, Servers):
        if isinstance(before, Servers):
            servers.take_over(before, counts=counts)
        servers.align(world.exchange(servers.deferrals.steps))
    elif isinstance(servers, HostServers):
        servers.take_over(before if isinstance(before, HostServers) else None)
