"""How a session goes on when the members of its run change: one path for a death, a join and a leave.

leave     every worker stops what it is doing and tells the coordinator what it has committed
settle    if any worker passed the commit barrier, all have finished, so the step commits everywhere;
          otherwise every worker rolls back
rejoin    in the next generation every worker builds world, comm and replica around the same model,
          takes over the state, and does again what it was doing (`rejoin.py`)
"""

import contextlib
import sys

from manyhands import telemetry
from manyhands.cluster.coordinator.control import NewGeneration
from manyhands.cluster.launchers import local
from manyhands.cluster.worker.member import Member
from manyhands.engine import once
from manyhands.engine.engine import Engine, ReplicaState
from manyhands.engine.join import GenerationLinks, next_generation
from manyhands.engine.rejoin import rejoin
from manyhands.errors import PeerLost


def can_go_on(engine: Engine) -> bool:
    """Whether the members of the run may change."""
    if engine.member is None:
        return False
    if engine.placed.is_whole:
        return True
    if engine.has_entered:  # where the run has one replica, its parts must outlive their workers
        return engine.progress.full > engine.placed.mesh.shards or engine.outlives
    # A model that is being divided for the first time is whole nowhere.
    new = engine.member.new_generation
    return new is not None and bool(new.state_holders)


def recover(engine: Engine, cause: Exception) -> None:
    """Members change: go on in the next generation, or, where that cannot be, let the cause end the run."""
    member = engine.member
    if member is None or not can_go_on(engine):
        raise cause
    with telemetry.timed("recover"):
        new, links = _leave(engine, member)
        dead = set(new.gone)
        while True:
            try:
                if member.number in new.state_holders:
                    _settle_all(engine, new)
                else:
                    for one in engine.siblings.open:
                        one.transaction = None  # the other workers have gone on without it
                for one in engine.siblings.open:
                    if one.pending is not None:
                        one.pending.keep()  # its memory is that of the generation that ends
                rejoin(engine, new, links)
                break
            except PeerLost:
                for one in engine.siblings.open:
                    if one.has_entered:
                        one.replica.take_back()
                new, links = _leave(engine, member)
                dead |= set(new.gone)
    telemetry.event(
        "generation",
        number=new.generation,
        workers=len(new.members),
        gone=sorted(dead),
        step=engine.progress.steps,
        cause=str(cause),
    )
    for one in engine.siblings.open:
        once.take_over(one)


def _leave(engine: Engine, member: Member) -> tuple[NewGeneration, GenerationLinks]:
    """Wait for the next generation; a worker that was asked to leave does not come back from here."""
    member.on_over()  # ends the waiting of workers on other hosts for this one
    entered = [one for one in engine.siblings.open if one.has_entered]
    for one in entered:
        with contextlib.suppress(PeerLost):
            one.comm.finish_sum()  # it is in memory that will be given back
    members, progress = engine.world.rank_info.members, engine.progress
    lost = tuple(members[rank] for rank in engine.world.host.gone()) if members else ()
    in_step = any(_can_be_finished(one) for one in entered)
    new, links = next_generation(
        engine.world.rank_info,
        member,
        has_state=engine.siblings.holds_state,
        commits=engine.siblings.commits,
        steps=progress.steps,
        in_step=in_step,
        lost=lost,
    )
    if member.number not in new.members:
        for one in entered:
            if one.generation.servers:
                one.generation.servers.drop()
            one.end()
        sys.exit(local.EXIT_LEFT)
    return new, links


def _can_be_finished(engine: Engine) -> bool:
    """Whether this worker is in a step that the workers of its host can finish without those that are gone."""
    transaction = engine.transaction
    return transaction is not None and not transaction.changes_nothing and engine.replica.steps_together


def _settle_all(engine: Engine, new: NewGeneration) -> None:
    """Decide whether the step under way counts, whichever session makes it. All workers decide alike, and again if
    another one dies meanwhile."""
    siblings = engine.siblings
    entered = [one for one in siblings.open if one.has_entered]
    behind = new.last_commits - siblings.commits
    under_way = [one for one in entered if one.transaction] or [siblings.stepping or engine]
    for one in entered:
        world = one.world
        world.host.end([rank for rank, number in enumerate(world.rank_info.members) if number in new.gone])
        was_in_step = one.transaction is not None and not one.transaction.changes_nothing
        _settle(one, new, behind if one in under_way else 0)
        if one.outlives:
            _tell_steps(one, was_in_step=was_in_step)


def _tell_steps(engine: Engine, *, was_in_step: bool) -> None:
    """How many steps of the generation that is over count: workers that take over parts of dead ones find it there."""
    steps = engine.progress.steps_here
    if was_in_step:
        engine.replica.put_back_buffers(steps)
    engine.replica.memory.decide(steps, parts=engine.placed.mesh.members)
    if engine.generation.part_copies is not None:
        engine.generation.part_copies.decide(engine.progress.commits)


def _settle(engine: Engine, new: NewGeneration, behind: int) -> None:
    """The same for one session, whose other workers have committed so much more."""
    transaction, progress = engine.transaction, engine.progress
    used = engine.generation.used
    if used:
        engine.feeds.settle(used.values())
    if engine.served:
        if transaction and transaction.changes_nothing:
            if new.last_commits > progress.commits and transaction.is_done:
                transaction.complete()
            engine.transaction = None
        return  # the servers know
    if engine.replica.gated:
        _settle_host(engine, new)
        return
    if behind > 0:
        if transaction and (transaction.is_done or engine.replica.is_shared):
            transaction.complete()
        else:
            progress.alone_until = progress.commits + behind  # steps that each worker makes by itself
    elif transaction and transaction.undo:
        transaction.undo.restore()
    elif transaction and _can_be_finished(engine) and new.in_step and _repaired(engine, new):
        transaction.complete()
    engine.transaction = None


def _settle_host(engine: Engine, new: NewGeneration) -> None:
    """A host finishes a step for which it has all sums. Whether other hosts have come as far it hears when they meet
    (`rejoin`)."""
    transaction, world = engine.transaction, engine.world
    # A worker that is alone on its host has finished the step, or has changed nothing yet.
    if transaction is None or world.host.size == 1:
        return
    is_common = world.rank_info.host in new.in_step
    whole = _repair(engine, new) if is_common else engine.replica.begun
    if whole > engine.progress.steps_here and engine.replica_state is not ReplicaState.BEHIND:
        transaction.complete()
        engine.transaction = None


def _repaired(engine: Engine, new: NewGeneration) -> bool:
    """Whether the step under way is in the replica after its repair."""
    return _repair(engine, new) > engine.progress.steps_here


def _repair(engine: Engine, new: NewGeneration) -> int:
    """Bring the replica that workers share to the end of a step; returns how many steps it has made."""
    replica, members = engine.replica, engine.world.rank_info.members
    if not replica.is_logged:  # a worker that is alone leaves nothing half done for others
        return engine.progress.steps_here
    ranks = engine.world.host.ranks
    dead = {index for index, rank in enumerate(ranks) if members[rank] not in new.state_holders}
    return replica.recover(dead, attempt=new.generation)
