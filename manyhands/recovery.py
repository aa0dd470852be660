"""How a session goes on when the members of its run change: one path for a death, a join and a leave.

Every worker leaves what it is doing, goes back to what was committed last, gets a seat in the next generation from the
coordinator, builds world, comm and replica anew around the same model, takes over the state, and does again what it was
doing. A transaction (a step, or an agreement of replicas) ends with a meeting of all. If anyone got past that meeting,
all had done their part: then it counts everywhere. If nobody did, it is taken back everywhere.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from manyhands import served, telemetry
from manyhands.cluster.control import Turn, invitation
from manyhands.cluster.hosts import open_meeting_place
from manyhands.cluster.launchers import local
from manyhands.cluster.member import Member, Regroup
from manyhands.cluster.seat import Seat, own_seat
from manyhands.cluster.world import GENERATION_BYTES, Station, World
from manyhands.comm.transports.wires import Wires
from manyhands.composing import compose
from manyhands.errors import PeerLost, TornUpdate
from manyhands.feeding import InHand
from manyhands.feeding import Record as FeedRecord
from manyhands.replica.inheritance import Undo, inherit
from manyhands.replica.state import spread
from manyhands.resuming import like, plain

if TYPE_CHECKING:
    from manyhands.sessions import Session

T = TypeVar("T")


@dataclass
class Transaction:
    """Something under way that all do together: how to take it back, and how to finish it."""

    undo: Undo | None
    finish: Callable[[float], None]
    loss: float
    is_done: bool = False
    """Whether this worker has done its part."""

    def complete(self) -> None:
        self.finish(self.loss)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a session knows that one which comes later must know as well."""

    calls: int
    commits: int
    steps: int
    epoch: int
    position: int
    samples: int
    samples_before: int
    seed: int
    parted: bool
    measured: Mapping[str, float | None]
    full: int
    outside: int
    resumed: Any
    place: str | None
    extra: Any
    saved_steps: int
    saved_epochs: int
    groups: list[Any]
    scheduler: Any
    feed: FeedRecord | None


def membership(environ: Mapping[str, str]) -> Member | None:
    """This process as a member of a run that can change, if it is one."""
    if local.INVITATION not in environ:
        return None
    seat = own_seat()
    if seat.server is not None:
        return None
    number = seat.rank if seat.number is None else seat.number
    member = Member(
        invitation(environ[local.INVITATION]),
        number,
        is_new=seat.is_new,
        host=seat.host,
        serves=seat.is_server,
    )
    if threading.current_thread() is threading.main_thread():
        # Servers stay until the run is over: others may not have what they have.
        leave = signal.SIG_IGN if seat.is_server else lambda *_: member.ask_to_leave()
        signal.signal(signal.SIGUSR1, leave)
    return member


@dataclass(frozen=True)
class Way:
    """How a worker gets to the others of a generation: its connections, and, for the first of them, the place where all
    meet."""

    wires: Wires
    store: Any


def first_world(member: Member) -> World | Station:
    """The world of the first generation that this worker is in; of a server, its station."""
    seat = own_seat()
    if member.serves:
        return _next_station(seat, member)
    if not seat.is_new:
        with contextlib.suppress(PeerLost):
            return World(seat, member.check)
    while True:
        turn, way = _turn(seat, member)
        if member.number not in turn.members:  # it was asked to leave before it had come
            sys.exit(local.EXIT_LEFT)
        with contextlib.suppress(PeerLost):
            return _world(seat, member, turn, way)
        member.on_over()


def stations(member: Member | None, first: Station) -> Iterator[Station]:
    """A server's, in one generation after the other, until nobody is left to serve."""
    station = first
    while True:
        yield station
        station.close()
        if member is None:
            return
        try:
            station = _next_station(station.seat, member)
        except PeerLost:
            return


def _next_station(seat: Seat, member: Member) -> Station:
    last, follows = seat.generation, True
    while True:
        member.on_over()
        turn, way = _turn(seat, member)
        # Whoever has a seat sees every turn, also of generations that nobody gets into.
        follows, last = follows and turn.generation == last + 1, turn.generation
        member.on_over = way.wires.cut
        with contextlib.suppress(PeerLost):
            member.check()
            return Station(_seat(seat, member, turn), member.check, way.wires, follows=follows)


def _turn(seat: Seat, member: Member, **state: Any) -> tuple[Turn, Way]:
    """Wait for the next generation."""
    wires, store, place = Wires(member.coordinator), None, ""
    if seat.address and not member.serves:  # it may become the first of several hosts
        with wires.drawing():
            store = open_meeting_place(seat.address)
        place = f"{seat.address}:{store.port}"
    turn = member.next(place=place, **state)
    return turn, Way(wires, store if turn.members[0] == member.number else None)


def _world(seat: Seat, member: Member, turn: Turn, way: Way) -> World:
    member.on_over = way.wires.cut
    member.check()  # it may have been over before we could be told
    return World(_seat(seat, member, turn), member.check, way.wires, way.store)


def surviving(session: "Session", attempt: Callable[[], T]) -> T:
    """Make an attempt, again and again if need be, in one generation after the other."""
    while True:
        try:
            return attempt()
        except (PeerLost, Regroup) as cause:
            if session.member is None or not session.can_go_on:
                raise
            _recover(session, session.member, cause)


def _recover(session: "Session", member: Member, cause: Exception) -> None:
    with telemetry.timed("recover"):
        turn, way = _next(session, member)
        dead = set(turn.gone)
        while True:
            try:
                if turn.members.index(member.number) < turn.heirs:
                    _settle(session, turn)
                else:
                    session.transaction = None  # the others have gone on without it
                enter(session, turn, way)
                break
            except PeerLost:
                if session.is_set_up:
                    session.replica.take_back()
                turn, way = _next(session, member)
                dead |= set(turn.gone)
    telemetry.event(
        "generation",
        number=turn.generation,
        workers=len(turn.members),
        gone=sorted(dead),
        step=session.steps,
        cause=str(cause),
    )


def _next(session: "Session", member: Member) -> tuple[Turn, Way]:
    """Wait for the next generation; a worker that was asked to leave does not come back from here."""
    member.on_over()  # those on other hosts who still wait for this one
    if session.is_set_up:
        with contextlib.suppress(PeerLost):
            session.comm.finish_sum()  # in memory that will be given back
    members = session.world.seat.members
    lost = tuple(members[rank] for rank in session.world.host.gone()) if members else ()
    in_step = session.transaction is not None and session.replica.steps_together
    turn, way = _turn(
        session.world.seat,
        member,
        has_state=session.is_set_up and session.has_state,
        commits=session.commits,
        steps=session.steps,
        in_step=in_step,
        lost=lost,
    )
    if member.number not in turn.members:
        if session.servers:
            session.servers.drop()
        session.leave_run()
        sys.exit(local.EXIT_LEFT)
    return turn, way


def _settle(session: "Session", turn: Turn) -> None:
    """Whether what was under way counts: all decide alike. If another worker dies meanwhile, it is done again."""
    members = session.world.seat.members
    session.world.host.end([rank for rank, number in enumerate(members) if number in turn.gone])
    if not session.strategy.lockstep:
        session.settle_alone(session.others_progress())
    if session.served:
        return  # the servers know
    transaction = session.transaction
    if session.replica.gated:
        _settle_host(session, turn)
        return
    if turn.last_commits > session.commits:
        if transaction and (transaction.is_done or session.replica.is_shared):
            transaction.complete()
        else:
            session.alone_until = turn.last_commits  # what all do each for themselves
    elif transaction and transaction.undo:
        transaction.undo.restore()
    elif transaction and turn.in_step and _repair(session, turn) > session.steps_here:
        transaction.complete()
    session.transaction = None


def _settle_host(session: "Session", turn: Turn) -> None:
    """What a host can do by itself: finish a step for which it has all sums. Other hosts may have come as far or not;
    that is seen when they meet (`_level`)."""
    transaction = session.transaction
    # A worker that is alone on its host has finished the step, or has not begun to change anything.
    if transaction is None or session.world.host.size == 1:
        return
    is_common = session.world.seat.host in turn.in_step
    whole = _repair(session, turn) if is_common else session.replica.begun
    if whole > session.steps_here and not session.is_behind:
        transaction.complete()
        session.transaction = None


def _level(session: "Session", rows: list[list[float]]) -> None:
    """What one host has committed counts: those who are behind keep their books as if they had come as far, and take
    the parameters from that host."""
    last = max(int(row[2]) for row in rows if row[0])
    if session.commits < last and session.transaction:
        steps = session.steps
        session.transaction.complete()
        session.is_behind = session.is_behind or session.steps > steps
    session.transaction = None


def _repair(session: "Session", turn: Turn) -> int:
    """Make the replica that workers share that of a whole step; returns how many it has made."""
    replica, members = session.replica, session.world.seat.members
    heirs = turn.members[: turn.heirs]
    ranks = session.world.host.ranks
    dead = {index for index, rank in enumerate(ranks) if members[rank] not in heirs}
    # A worker that is alone changes nothing that others would have to put right.
    return replica.recover(dead, attempt=turn.generation) if replica.is_journaled else session.steps_here


def enter(session: "Session", turn: Turn | None, way: Way | None = None) -> None:
    """Be in a generation, with everything that was before it; all its members do this together."""
    member, old_world = session.member, session.world
    old = session.replica if session.is_set_up and session.has_state else None
    world = old_world
    if turn is not None and turn.generation > old_world.seat.generation:
        assert member is not None
        assert way is not None
        world = _world(old_world.seat, member, turn, way)
        if world.rank >= turn.heirs:
            session.has_state, old = False, None
            if session.is_set_up:
                session.replica.let_go()
    is_in_loop = session.feed.data is not None
    rows = world.exchange([float(old is not None), session.calls, session.commits, float(is_in_loop)])
    have = [bool(row[0]) for row in rows]
    whole = have
    if old is not None:
        old.let_go()
        if old.gated:
            _level(session, rows)
    if world.seat.address:
        whole = [bool(row[0]) for row in world.exchange([float(old is not None and not session.is_behind)])]
        if any(have) and not any(whole):
            raise TornUpdate(
                "no host is left that has the parameters of a whole step; go on from the last checkpoint"
            )
    before = session.comm.servers if old is not None else None
    if session.servers and world is not old_world:
        session.servers.drop()
    replica, comm, servers = compose(
        session.model,
        session.optimizer,
        session.loss,
        world,
        session.strategy,
        session.placing,
        session.clip_norm,
        journaled=session.journaled,
        has_begun=any(have),
        keeps=old is not None,
    )
    if comm.servers and any(have):
        made = before.made(session.steps_here) if before else 0
        counts = session.transaction is not None and comm.servers.made(0) > made
        if session.transaction and counts:
            session.transaction.complete()
        session.transaction = None
        served.go_on(comm.servers, before, world, counts=counts)
        if servers and servers.roam and not session.strategy.lockstep:
            progress = session.feed.progress
            used = served.used_by(servers, world, old_world, progress, was_here=old is not None)
            if used and old is not None:
                session.settle_alone(used)
    if any(have):
        if replica.lent is None:
            of_peers = [whole[rank] for rank in session.placing.peer_ranks]
            inherit(replica, old if whole[world.rank] else None, comm, session.placing.peers, of_peers)
            session.strategy.regroup(replica, comm, is_new=not whole[world.rank])
        elif old is not None:
            replica.kept.update(old.kept)
        most = max(row[1] for row, one in zip(rows, have, strict=True) if one)
        those = [rank for rank, row in enumerate(rows) if have[rank] and row[1] == most]
        source = next((rank for rank in those if rows[rank][3]), those[0])  # one that is in a loop, if any
        told = world.gather(_record(session) if world.rank == source else b"")[source]
        held = _in_hand(session, turn, old_world) if old is not None else InHand()
        everyone = [msgspec.json.decode(row, type=InHand) for row in world.gather(msgspec.json.encode(held))]
        record = msgspec.json.decode(told, type=Record)
        mesh = session.placing.mesh
        if old is None or session.calls < most:
            _take_over(session, record, keeps=old is not None)
        elif record.feed and record.feed.is_in_loop and not is_in_loop:
            # Others have drawn some of it already.
            session.feed.take_over(record.feed, record.seed, is_in_it=False, keeps=True)
            session.samples_before = session.samples - session.position
        session.feed.deal(mesh.feeds, everyone[:: mesh.copies], mesh.feed(world.rank))
    elif replica.lent is None:  # else servers have seen to it
        spread(replica, comm, session.placing.peers)
    # Whoever has come here has everything. Should somebody be missing, the next thing we do together will tell.
    with contextlib.suppress(*((PeerLost,) if member else ())):
        world.host.barrier()
        if world is not old_world:
            _give_back(old_world, world)
    session.settle_in(world, replica, comm, servers)
    if world is not old_world:
        old_world.close()
    if member is not None and member.turn is not None:
        member.enter(commits=session.commits, steps=session.steps)


def _in_hand(session: "Session", turn: Turn | None, old: World) -> InHand:
    """The samples that this worker has and has not used. Those who work on the same samples have the same, unless they
    come from different replicas: then they give them up."""
    mesh = session.placing.placement.mesh(old.size)
    first = session.placing.replica * mesh.members
    crew, members = slice(first, first + mesh.members), old.seat.members
    if turn and turn.members[crew] not in [
        members[at : at + mesh.members] for at in range(0, old.size, mesh.members)
    ]:
        session.takeovers += 1
        return InHand()
    return session.feed.in_hand(mesh.feed(old.rank))


def _give_back(old: World, world: World) -> None:
    """Nobody needs the memory of the generations before any more, also of those that nobody got into."""
    if world.host.index == 0:
        arena = world.host.arena
        arena.give_back(old.host.arena.start, old.host.arena.used)
        arena.give_back((old.seat.generation + 1) * GENERATION_BYTES, arena.start)


def _seat(seat: Seat, member: Member, turn: Turn) -> Seat:
    servers = len(turn.servers) if seat.address else seat.servers
    return replace(
        seat,
        rank=(*turn.members, *turn.servers).index(member.number),
        size=len(turn.members) + servers,
        servers=servers,
        members=turn.members,
        generation=turn.generation,
        is_new=False,
        hosts=turn.hosts if seat.address else (),
        store=turn.place if seat.address else None,
    )


def _record(session: "Session") -> bytes:
    scheduler = session.scheduler
    return msgspec.json.encode(
        Record(
            calls=session.calls,
            commits=session.commits,
            steps=session.steps,
            epoch=session.epoch,
            position=session.position,
            samples=session.samples,
            samples_before=session.samples_before,
            seed=session.seed,
            parted=session.parted,
            measured=session.measured,
            full=session.full,
            outside=session.outside,
            resumed=session.resumed,
            place=str(session.place) if session.place else None,
            extra=session.extra,
            saved_steps=session.cadence.saved_steps,
            saved_epochs=session.cadence.saved_epochs,
            groups=[plain(group) for group in session.optimizer.param_groups],
            scheduler=plain(scheduler.state_dict()) if scheduler is not None else None,
            feed=session.feed.record(),
        )
    )


def _take_over(session: "Session", record: Record, *, keeps: bool) -> None:
    """Become, but for the replica, what another worker's session is."""
    session.caught_up_at, session.outside_before = record.calls, record.outside
    session.commits, session.steps, session.epoch = record.commits, record.steps, record.epoch
    session.position, session.samples, session.seed = record.position, record.samples, record.seed
    session.samples_before = record.samples_before
    session.parted, session.resumed = record.parted, record.resumed
    session.full = record.full
    session.place, session.extra = Path(record.place) if record.place else None, record.extra
    session.cadence.mark(steps=record.saved_steps, epochs=record.saved_epochs)
    session.measured = {name: float("nan") if v is None else v for name, v in record.measured.items()}
    is_in_it = session.feed.data is not None and session.calls == record.calls
    session.feed.take_over(record.feed, record.seed, is_in_it=is_in_it, keeps=keeps)
    session.takeovers += not keeps
    for group, saved in zip(session.optimizer.param_groups, record.groups, strict=True):
        group.update({key: like(value, group.get(key)) for key, value in saved.items()})
    if session.scheduler is not None and record.scheduler is not None:
        now = session.scheduler.state_dict()
        session.scheduler.load_state_dict({key: like(v, now.get(key)) for key, v in record.scheduler.items()})
