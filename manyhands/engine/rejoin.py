"""Enter a generation with everything that was before it; all its members do this together."""

import contextlib
import itertools
import sys
from dataclasses import dataclass

import msgspec
from safetensors.torch import load, save
from torch import Tensor

from manyhands.cluster.coordinator.control import NewGeneration
from manyhands.cluster.worker.world import GENERATION_BYTES, World
from manyhands.comm.comm import ServerAccess
from manyhands.engine import coded_errors, generation, pace, random_state, worker_process
from manyhands.engine.build import Built, compose, copies_of, divide, revive
from manyhands.engine.engine import Engine, ReplicaState
from manyhands.engine.feed_record import Outstanding
from manyhands.engine.feeds import MOST
from manyhands.engine.join import GenerationLinks, join_world
from manyhands.engine.roll import call_roll
from manyhands.engine.siblings import Siblings
from manyhands.engine.snapshot import Snapshot, adopt, capture
from manyhands.errors import PeerLost, TornUpdate
from manyhands.placement.mesh import Groups
from manyhands.placement.placed import PlacedModel
from manyhands.replica import part_place
from manyhands.replica.part import Part
from manyhands.replica.part_place import PartPlace
from manyhands.replica.replica import Replica
from manyhands.replica.state.inheritance import inherit
from manyhands.replica.state.part_copies import PartCopies
from manyhands.replica.state.state import spread
from manyhands.servers.worker import joining
from manyhands.servers.worker.client import Servers


def enter_first(engine: Engine) -> None:
    """Enter the generation for which this process has been started, or in which its script makes one more session."""
    if engine.has_entered or engine.is_closed:
        return  # a recovery has done it already
    siblings, new = engine.siblings, engine.member.new_generation if engine.member else None
    world = siblings.world
    if new and siblings.roll is None:
        siblings.follow(call_roll(world, []))
        siblings.is_new = siblings.is_joining
    if siblings.roll and siblings.roll.is_over(engine.number):
        _hand_over(siblings, engine.number, world)
        return
    engine.world = siblings.world_of(engine, world)
    _enter(engine, engine.world, new)
    if engine.member and new:
        engine.member.enter(commits=siblings.commits, steps=engine.progress.steps)


def rejoin(engine: Engine, new: NewGeneration, links: GenerationLinks) -> None:
    """Enter the generation that follows, with all sessions."""
    siblings, member, world = engine.siblings, engine.member, engine.siblings.worlds[-1]
    if new.generation > world.rank_info.generation and member:
        world = join_world(world.rank_info, member, new, links)
        for one in siblings.open:
            if member.number not in new.state_holders and one.has_entered:
                one.replica_state = ReplicaState.OUTDATED
                one.replica.let_go()
    siblings.follow(call_roll(world, siblings.told()))
    siblings.worlds.append(world)
    _move(siblings, world, are_all_here=_enter_all(siblings, world, new))
    if member and member.new_generation:
        member.enter(commits=siblings.commits, steps=engine.progress.steps)


def _enter_all(siblings: Siblings[Engine], world: World, new: NewGeneration) -> bool:
    """One session after the other. A worker that joins makes them in this order, and the others wait for it. Says
    whether all have come as far."""
    are_all_here = True
    known = len(siblings.roll.rows) if siblings.roll else 0
    for number in range(min(siblings.made, known)):
        engine = siblings.get(number)
        if siblings.roll and siblings.roll.is_over(number):
            if len(new.members) > len(new.state_holders):
                _hand_over(siblings, number, world)
        elif engine is not None:
            are_all_here = _enter(engine, siblings.world_of(engine, world), new)
    for engine in siblings.open:
        if not engine.has_entered:
            engine.world = world  # until all have made it
    return are_all_here


def _move(siblings: Siblings[Engine], world: World, *, are_all_here: bool) -> None:
    """All sessions are in the new generation: no worker needs the memory and the connections of those before."""
    older, siblings.worlds = [one for one in siblings.worlds if one is not world], [world]
    siblings.world, world.siblings = world, siblings
    if older and are_all_here:
        _give_back(older[0], world)
    for one in older:
        worker_process.move(one, world)
        one.close()


def _hand_over(siblings: Siblings[Engine], number: int, world: World) -> None:
    """A session that is over, for the workers that join: what it has trained, and what its calls have returned."""
    progress, model = siblings.closed(number)
    said, tensors = b"", b""
    if world.rank == 0:
        said = msgspec.json.encode(progress.encode())
        if model is not None:  # else no part of the script knows it any more
            state = {name: v for name, v in model.state_dict().items() if isinstance(v, Tensor)}
            tensors = save({name: v.detach().cpu().clone().contiguous() for name, v in state.items()})
    said, tensors = world.gather(said)[0], world.gather(tensors)[0]
    engine = siblings.get(number)
    if engine is None or engine.is_closed:
        return
    engine.progress.adopt(msgspec.json.decode(said))
    engine.progress.calls, engine.progress.caught_up_at = 0, sys.maxsize
    engine.progress.outside_before = sys.maxsize
    if tensors:
        engine.training.model.load_state_dict(load(tensors), strict=False)
    engine.is_closed = True
    siblings.end(engine)


@dataclass(frozen=True)
class _Members:
    """What the members of the new generation bring."""

    have: list[bool]
    """By rank, whether the worker has state of the generations before."""
    whole: list[bool]
    """By rank, whether its replica has all committed steps."""
    calls: list[float]
    in_loop: list[float]
    turns: list[float]
    steps: int
    """The most that a replica of theirs counts."""
    places: list[int]
    """By rank, the number under which copies of the worker's part outlived it; -1 where there were none."""

    @property
    def has_begun(self) -> bool:
        """Whether some of them have trained together before."""
        return any(self.have)

    def take_over(self, peers: Groups) -> bool:
        """Whether some part is on none of the workers that have state, so that a new one takes it over."""
        return self.has_begun and not all(any(self.whole[rank] for rank in ranks) for ranks in peers)

    @property
    def source(self) -> int:
        """A worker whose script has come furthest; one that is in a loop, if there is any."""
        most = max(calls for calls, has in zip(self.calls, self.have, strict=True) if has)
        ranks = [rank for rank, calls in enumerate(self.calls) if self.have[rank] and calls == most]
        return max(ranks, key=lambda rank: (self.in_loop[rank], self.turns[rank]))  # the first of several


def _enter(engine: Engine, world: World, new: NewGeneration | None) -> bool:
    """Says whether all workers have come as far."""
    old_world, placed = engine.world, engine.placed
    old = engine.replica if engine.holds_state else None
    members = _meet(engine, world, old)
    before = engine.comm.servers if old is not None else None
    if engine.has_entered and engine.generation.servers and world is not old_world:
        engine.generation.servers.drop()
    part = divide(
        engine.training,
        world,
        placed,
        has_begun=members.has_begun,
        keeps=old is not None,
        elsewhere=engine.siblings.trained_before(engine),
    )
    place = _place(engine, world, members)
    left = _left(engine, world, part, members, place)
    built = compose(
        part,
        engine.training,
        engine.settings,
        engine.traits,
        world,
        placed,
        has_begun=members.has_begun,
        session=engine.number,
    )
    replica, comm, servers = built
    if members.has_begun:
        if comm.servers:
            _reconcile_servers(engine, world, comm.servers, before)
            _settle_data(engine, world, old, servers)
        engine.siblings.joint.undo(engine.number)
        _inherit(engine, world, old or left, members, built)
        _catch_up(engine, world, old, members, new)
        engine.keep_graphs()
    elif not replica.is_served:  # else the servers have given all workers the parameters
        spread(replica, comm, placed.peers)
    copies = _complete(engine, replica, world, place)
    draw_own_numbers(engine, world)
    # From here on this worker has everything. If another one is missing, the next exchange will tell.
    are_all_here = False
    with contextlib.suppress(*((PeerLost,) if engine.member else ())):
        world.host.barrier()
        are_all_here = True
    engine.enter(
        generation.begin(world, engine.placed, built, lockstep=engine.traits.lockstep, part_copies=copies)
    )
    return are_all_here


def _complete(engine: Engine, replica: Replica, world: World, place: PartPlace) -> PartCopies | None:
    """The replica has all that was before this generation, and so has what of it outlives this worker."""
    replica.complete()
    copies = copies_of(replica, engine.settings, engine.traits, world, engine.placed, place)
    if copies is not None:
        copies.make(engine.progress.commits)
        copies.complete()
    return copies


def _meet(engine: Engine, world: World, old: Replica | None) -> _Members:
    """Tell the other members what this worker brings."""
    progress = engine.progress
    in_loop, turns = float(bool(engine.feeds.open)), float(engine.feeds.turns)
    steps = float(old.steps if old is not None else 0)
    copies = engine.generation.part_copies if old is not None else None
    has, place = float(old is not None), float(copies.part if copies is not None else -1)
    rows = world.exchange([has, progress.calls, progress.commits, in_loop, turns, steps, place])
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
    calls, in_loop_by_rank, turns_by_rank = ([row[at] for row in rows] for at in (1, 3, 4))
    most, places = int(max(row[5] for row in rows)), [int(row[6]) for row in rows]
    return _Members(have, whole, calls, in_loop_by_rank, turns_by_rank, most, places)


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
    feeds = engine.feeds
    progress = [*feeds.progress, *[0] * (MOST - len(feeds.slots))]
    used = joining.used_by(servers, world, engine.world, progress, was_here=old is not None)
    if used and old is not None:
        feeds.settle(used)


def _inherit(engine: Engine, world: World, old: Replica | None, members: _Members, built: Built) -> None:
    """The replica takes over the state of those before it."""
    replica, comm, _ = built
    if replica.is_served:
        if old is not None:
            replica.kept.update(old.kept)
        return
    have, placed = _who_has(engine.placed, members), engine.placed
    is_whole = have[placed.peers.rank]
    inherit(replica, old if is_whole else None, comm, placed.peers, have)
    if members.take_over(placed.mesh.peers()):
        replica.eval_batch = None  # the worker that took a part over has none; a replica evaluates together
    coded_errors.inherit(engine, replica, old)
    engine.strategy.regroup(replica, comm, is_new=not is_whole)


def _who_has(placed: PlacedModel, members: _Members) -> list[bool]:
    """Of the workers with the same part, those that have its values. If all that had them are dead, the first one takes
    over what they have left."""
    have = [members.whole[rank] for rank in placed.peer_ranks]
    return have if any(have) else [True, *have[1:]]


def _place(engine: Engine, world: World, members: _Members) -> PartPlace:
    """Where this worker's part outlives it. Under strategies whose replicas differ, a worker that takes a part over
    needs that of the replica of the workers that are left, which has been another one of so many: they say which."""
    placed = engine.placed
    place = PartPlace(world.host.arena.fd, engine.number, placed.part_number)
    if engine.traits.logs_parts:
        return place
    size = placed.mesh.members
    known = [max(members.places[at : at + size]) // size for at in range(0, world.size, size)]  # -1: new
    first: list[int] = []
    for number in known:
        free = next(one for one in itertools.count() if one not in (*first, *known))
        first.append(free if number < 0 or number in first else number)
    return place.of(first[placed.replica] * size + placed.part_number)


def _left(engine: Engine, world: World, part: Part, members: _Members, place: PartPlace) -> Replica | None:
    """What the workers that had this part have left, if none of them lives and this worker is to take it over."""
    if not (members.has_begun and part.spread and engine.traits.parts_outlive):
        return None
    ranks = engine.placed.peer_ranks
    if any(members.whole[rank] for rank in ranks) or world.rank != ranks[0]:
        return None
    found = revive(part, engine.training, engine.settings, engine.traits, world, engine.placed, place=place)
    found.steps = members.steps
    return found


def _catch_up(
    engine: Engine, world: World, old: Replica | None, members: _Members, new: NewGeneration | None
) -> None:
    """The session goes on where the furthest worker is; what no worker has is assigned again."""
    feeds, mesh = engine.feeds, engine.placed.mesh
    source = members.source
    if old is not None and members.take_over(mesh.peers()) and not engine.traits.synchronous:
        _keep_learned(engine)
    said = world.gather(msgspec.json.encode(capture(engine)) if world.rank == source else b"")[source]
    own = _outstanding(engine, new) if old is not None else []
    rows = world.gather(msgspec.json.encode(own))
    outstanding = [msgspec.json.decode(row, type=list[Outstanding]) for row in rows]
    snapshot = msgspec.json.decode(said, type=Snapshot)
    if old is None or engine.progress.calls < members.calls[source]:
        adopt(engine, snapshot, keeps=old is not None)
        engine.progress.takeovers += old is None
    elif snapshot.feeds.turns > feeds.turns:
        # Other workers have drawn some of it already.
        if not feeds.is_in_loop:
            engine.progress.begin_epoch()
        feeds.adopt_ahead(snapshot.feeds, snapshot.progress["seed"])
    feeds.assign(mesh.feeds, outstanding[:: mesh.copies], mesh.feed(world.rank))
    pace.level(engine, world.exchange(pace.row(engine)))
    engine.progress.has_regrouped = True
    if old is None:
        now = capture(engine)
        engine.script.is_late, engine.joined_with = True, (now.groups, now.scheduler)


def _keep_learned(engine: Engine) -> None:
    """No replica was whole, and all go on from this worker's, which is complete again: what it has learned counts."""
    world = engine.world  # of the generation before
    mesh = engine.placed.placement.mesh(world.size)
    first = mesh.at(world.rank).replica * mesh.shards
    engine.feeds.commit([range(first, first + mesh.shards)])


def _outstanding(engine: Engine, new: NewGeneration | None) -> list[Outstanding]:
    """The samples that this worker has drawn and not used. Workers of one replica have the same, unless they come
    from different replicas: then they give them up."""
    old = engine.world
    mesh = engine.placed.placement.mesh(old.size)
    first = engine.placed.replica * mesh.members
    members = old.rank_info.members
    replicas = [members[at : at + mesh.members] for at in range(0, old.size, mesh.members)]
    if new and new.members[first : first + mesh.members] not in replicas:
        engine.progress.takeovers += 1
        return []
    return engine.feeds.outstanding(mesh.feed(old.rank))


def draw_own_numbers(engine: Engine, world: World) -> None:
    """A worker that is new begins its stream of random numbers; those of workers with the same samples are the same."""
    seed, copies = engine.settings.random_seed, engine.placed.mesh.copies
    if seed is None or world.size == 1:
        return
    if not engine.has_own_numbers:
        engine.has_own_numbers = True
        info = world.rank_info
        random_state.take_own(seed, engine.placed.feed, number=info.known_as if info.generation else None)
    if copies > 1:
        random_state.share(world, copies)


def _give_back(old: World, world: World) -> None:
    """No worker needs the memory of the generations before any more, also of those that no worker got into."""
    if world.host.index == 0:
        arena = world.host.arena
        arena.give_back(old.host.arena.start, old.host.arena.used)
        arena.give_back((old.rank_info.generation + 1) * GENERATION_BYTES, arena.start)
        part_place.forget(arena.fd, world.rank_info.generation)
