"""Enter a generation with everything that was before it; all its members do this together."""

import contextlib
from dataclasses import dataclass

import msgspec

from manyhands.cluster.coordinator.control import NewGeneration
from manyhands.cluster.worker.world import GENERATION_BYTES, World
from manyhands.comm.comm import ServerAccess
from manyhands.engine import generation, worker_process
from manyhands.engine.build import Built, compose
from manyhands.engine.engine import Engine, ReplicaState
from manyhands.engine.feed import Outstanding
from manyhands.engine.join import GenerationLinks, join_world
from manyhands.engine.snapshot import Snapshot, adopt, capture
from manyhands.errors import PeerLost, TornUpdate
from manyhands.replica.replica import Replica
from manyhands.replica.state.inheritance import inherit
from manyhands.replica.state.state import spread
from manyhands.servers.worker import joining
from manyhands.servers.worker.client import Servers


def enter_first(engine: Engine) -> None:
    """Enter the generation for which this process has been started."""
    if not engine.has_entered:  # else a recovery has done it already
        _enter(engine, engine.world, engine.member.new_generation if engine.member else None)


def rejoin(engine: Engine, new: NewGeneration, links: GenerationLinks) -> None:
    """Enter the generation that follows."""
    world = engine.world
    if new.generation > world.rank_info.generation and engine.member:
        world = join_world(world.rank_info, engine.member, new, links)
        if world.rank >= new.state_holders and engine.has_entered:
            engine.replica_state = ReplicaState.OUTDATED
            engine.replica.let_go()
    _enter(engine, world, new)


@dataclass(frozen=True)
class _Members:
    """What the members of the new generation bring."""

    have: list[bool]
    """By rank, whether the worker has state of the generations before."""
    whole: list[bool]
    """By rank, whether its replica has all committed steps."""
    calls: list[float]
    in_loop: list[float]

    @property
    def has_begun(self) -> bool:
        """Whether some of them have trained together before."""
        return any(self.have)

    @property
    def source(self) -> int:
        """A worker whose script has come furthest; one that is in a loop, if there is any."""
        most = max(calls for calls, has in zip(self.calls, self.have, strict=True) if has)
        ranks = [rank for rank, calls in enumerate(self.calls) if self.have[rank] and calls == most]
        return next((rank for rank in ranks if self.in_loop[rank]), ranks[0])


def _enter(engine: Engine, world: World, new: NewGeneration | None) -> None:
    old_world = engine.world
    old = engine.replica if engine.holds_state else None
    members = _meet(engine, world, old)
    before = engine.comm.servers if old is not None else None
    if engine.has_entered and engine.generation.servers and world is not old_world:
        engine.generation.servers.drop()
    built = compose(
        engine.training,
        engine.settings,
        engine.traits,
        world,
        engine.placed,
        has_begun=members.has_begun,
        keeps=old is not None,
    )
    replica, comm, servers = built
    if members.has_begun:
        if comm.servers:
            _reconcile_servers(engine, world, comm.servers, before)
            _settle_data(engine, world, old, servers)
        _inherit(engine, world, old, members, built)
        _catch_up(engine, world, old, members, new)
    elif not replica.is_served:  # else the servers have given all workers the parameters
        spread(replica, comm, engine.placed.peers)
    # From here on this worker has everything. If another one is missing, the next exchange will tell.
    with contextlib.suppress(*((PeerLost,) if engine.member else ())):
        world.host.barrier()
        if world is not old_world:
            _give_back(old_world, world)
    engine.enter(generation.begin(world, engine.placed, built, lockstep=engine.traits.lockstep))
    if world is not old_world:
        worker_process.move(old_world, world)
        old_world.close()
    if engine.member and engine.member.new_generation:
        engine.member.enter(commits=engine.progress.commits, steps=engine.progress.steps)


def _meet(engine: Engine, world: World, old: Replica | None) -> _Members:
    """Tell the other members what this worker brings."""
    progress = engine.progress
    in_loop = float(engine.feed.data is not None)
    rows = world.exchange([float(old is not None), progress.calls, progress.commits, in_loop])
    have = [bool(row[0]) for row in rows]
    whole = have
    if old is not None:
        old.let_go()
        if old.gated:
            _reconcile_hosts(engine, max(int(row[2]) for row in rows if row[0]))
    if world.rank_info.address:
        own = engine.replica_state is ReplicaState.WHOLE
        whole = [bool(row[0]) for row in world.exchange([float(own)])]
        if any(have) and not any(whole):
            raise TornUpdate(
                "no host is left that has the parameters of a whole step; go on from the last checkpoint"
            )
    return _Members(have, whole, [row[1] for row in rows], [row[3] for row in rows])


def _reconcile_hosts(engine: Engine, last: int) -> None:
    """What one host has committed counts on all hosts: a worker that is behind commits the step too, and takes the
    parameters from that host."""
    progress = engine.progress
    if progress.commits < last and engine.transaction:
        steps = progress.steps
        engine.transaction.complete()
        if progress.steps > steps:
            engine.replica_state = ReplicaState.BEHIND
    engine.transaction = None


def _reconcile_servers(
    engine: Engine, world: World, servers: ServerAccess, before: ServerAccess | None
) -> None:
    """The servers decide whether the step that was under way counts."""
    made = before.made(engine.progress.steps_here) if before else 0
    counts = engine.transaction is not None and servers.made(0) > made
    if engine.transaction and counts:
        engine.transaction.complete()
    engine.transaction = None
    joining.go_on(servers, before, world, counts=counts)


def _settle_data(engine: Engine, world: World, old: Replica | None, servers: Servers | None) -> None:
    """Elastic servers know how far each worker of the generation before had come with its data."""
    if servers is None or not servers.is_elastic or engine.traits.lockstep:
        return
    feed = engine.feed
    used = joining.used_by(servers, world, engine.world, feed.progress, was_here=old is not None)
    if used and old is not None:
        feed.settle(used)


def _inherit(engine: Engine, world: World, old: Replica | None, members: _Members, built: Built) -> None:
    """The replica takes over the state of those before it."""
    replica, comm, _ = built
    if replica.is_served:
        if old is not None:
            replica.kept.update(old.kept)
        return
    is_whole, placed = members.whole[world.rank], engine.placed
    of_peers = [members.whole[rank] for rank in placed.peer_ranks]
    inherit(replica, old if is_whole else None, comm, placed.peers, of_peers)
    engine.strategy.regroup(replica, comm, is_new=not is_whole)


def _catch_up(
    engine: Engine, world: World, old: Replica | None, members: _Members, new: NewGeneration | None
) -> None:
    """The session goes on where the furthest worker is; what no worker has is assigned again."""
    feed, mesh = engine.feed, engine.placed.mesh
    source = members.source
    said = world.gather(msgspec.json.encode(capture(engine)) if world.rank == source else b"")[source]
    own = _outstanding(engine, new) if old is not None else Outstanding()
    rows = world.gather(msgspec.json.encode(own))
    outstanding = [msgspec.json.decode(row, type=Outstanding) for row in rows]
    snapshot = msgspec.json.decode(said, type=Snapshot)
    if old is None or engine.progress.calls < members.calls[source]:
        adopt(engine, snapshot, keeps=old is not None)
        engine.progress.takeovers += old is None
    elif snapshot.feed and snapshot.feed.is_in_loop and feed.data is None:
        # Other workers have drawn some of it already.
        feed.adopt(snapshot.feed, snapshot.progress["seed"], is_in_loop=False, keeps=True)
        engine.progress.begin_epoch()
    feed.assign(mesh.feeds, outstanding[:: mesh.copies], mesh.feed(world.rank))


def _outstanding(engine: Engine, new: NewGeneration | None) -> Outstanding:
    """The samples that this worker has drawn and not used. Workers of one replica have the same, unless they come
    from different replicas: then they give them up."""
    old = engine.world
    mesh = engine.placed.placement.mesh(old.size)
    first = engine.placed.replica * mesh.members
    members = old.rank_info.members
    replicas = [members[at : at + mesh.members] for at in range(0, old.size, mesh.members)]
    if new and new.members[first : first + mesh.members] not in replicas:
        engine.progress.takeovers += 1
        return Outstanding()
    return engine.feed.outstanding(mesh.feed(old.rank))


def _give_back(old: World, world: World) -> None:
    """No worker needs the memory of the generations before any more, also of those that no worker got into."""
    if world.host.index == 0:
        arena = world.host.arena
        arena.give_back(old.host.arena.start, old.host.arena.used)
        arena.give_back((old.rank_info.generation + 1) * GENERATION_BYTES, arena.start)
