"""What is not a step: all workers come together, and their replicas agree, before any of them goes on."""

import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from manyhands import telemetry
from manyhands.cluster.launchers import local
from manyhands.data.ledger import Assignment, Ranges
from manyhands.engine import handshake as handshakes
from manyhands.engine import save as saving
from manyhands.engine.engine import Engine
from manyhands.engine.handshake import END_OF_DATA, LEAVE, SAVE, SAVE_NOW
from manyhands.engine.step import NO_WORK, look_up, publish, run, transaction_of
from manyhands.errors import CheckpointError, UsageError
from manyhands.replica.share import Share
from manyhands.replica.state.state import average_buffers
from manyhands.strategies.interface import Served


def pause(engine: Engine, purpose: int) -> None:
    """All workers are here; parameters and buffers are the same everywhere."""
    engine.clock.stop()
    gather(engine, purpose)
    agree(engine)
    average_buffers(engine.replica.part.buffers(), engine.placed.observers)


def gather(engine: Engine, purpose: int) -> None:
    """Take part in the other workers' steps, without data, until all workers have come for the same thing."""
    progress, feed, lockstep = engine.progress, engine.feed, engine.traits.lockstep
    while True:
        if not lockstep:
            look_up(engine)
            _leave(engine)
            if not engine.traits.late:
                publish(engine)
        while progress.commits < progress.alone_until:
            run(engine, NO_WORK, None)
        handshake = handshakes.begin(engine, purpose)
        answers = handshake.wait()
        if handshakes.STEP in answers.purposes:
            run(engine, NO_WORK, handshake)
            answer(engine, answers.asked)
        elif answers.asked > engine.answering:
            answer(engine, answers.asked)
        elif answers.agree():
            break
    if feed.is_under_way:
        feed.note(answers.drawn)
    engine.change_is_due = answers.change
    if not lockstep:
        _count_together(engine)


def _leave(engine: Engine) -> None:
    """Where workers do not wait for each other at a step, the servers need not wait for this one until all pause."""
    strategy, replica, fleet = engine.strategy, engine.replica, engine.generation.fleet
    if fleet is None:
        return
    if isinstance(strategy, Served):
        strategy.leave(replica, fleet)

    def take_part(share: Share) -> None:
        strategy.step(replica, fleet, share)
        replica.settle()

    fleet.leave(take_part)


def _count_together(engine: Engine) -> None:
    """Where each worker has counted by itself: what all of them have done."""
    progress = engine.progress
    row = [float(progress.uncounted), float(progress.parted), float(progress.position)]
    rows = engine.world.exchange(row)
    others = sum(int(row[0]) for row in rows) - progress.uncounted
    progress.samples += others
    engine.clock.add(others)
    progress.uncounted = 0
    progress.parted = any(row[1] for row in rows)
    progress.position = int(min(row[2] for row in rows))  # the slowest worker still has the rest
    engine.feed.commit()


def agree(engine: Engine) -> None:
    """The parameters of all replicas are the same from here on, and what was learned is safe."""
    progress, feed, world = engine.progress, engine.feed, engine.world
    if not progress.parted:
        return

    def finish(loss: float) -> None:
        progress.parted = False
        progress.commits += 1
        feed.commit()

    with transaction_of(engine, finish, is_joint=True):
        engine.strategy.agree(engine.replica, engine.generation.fleet or engine.comm)
        if engine.member:
            world.exchange([])  # hosts, too, must not be more than this apart
        else:
            world.host.barrier()


# The end of an epoch


def end_of_data(engine: Engine, calls: int, assignment: Assignment | None = None) -> None:
    """Wait for all workers; if members have changed since, there may be more to do for this worker."""
    progress, feed = engine.progress, engine.feed
    if progress.caught_up_at > calls:  # the other workers had all that they needed of this one
        progress.calls = calls + 1
    if progress.calls > calls or (assignment and feed.assignment is not assignment):
        return
    gather(engine, END_OF_DATA)
    if engine.member:
        agree(engine)  # an epoch is over when what was learned in it is safe
    feed.commit()
    if assignment and not feed.is_complete:
        feed.assign(engine.placed.mesh.feeds)
        return
    if assignment:
        feed.end_epoch(notes(engine))
    progress.end_epoch(feed.length if assignment else None)
    if engine.save_every and engine.save_every.is_due_after_epoch(progress):
        answer(engine, SAVE_NOW)


def notes(engine: Engine) -> list[Ranges]:
    """The samples that the steps of each worker have used in this epoch."""
    used = engine.feed.audit.used if engine.placed.counts else []
    said = engine.world.gather(msgspec.json.encode(used))
    return [msgspec.json.decode(row, type=Ranges) for row in said]


# What workers ask each other for


def answer(engine: Engine, asked: int) -> None:
    """Do what a worker has asked for; all workers do it at the same point."""
    if asked <= engine.answering:
        return
    before, engine.answering = engine.answering, asked
    try:
        if asked == LEAVE:
            _save_and_leave(engine)
        place = engine.progress.directory or checkpoints(engine)
        save(engine, place, engine.progress.extra, engine.settings.keep)
    finally:
        engine.answering = before


def _save_and_leave(engine: Engine) -> NoReturn:
    """The machine is about to be taken away."""
    progress, out = engine.progress, engine.settings.out
    place = progress.directory or (out / "checkpoints" if out else None)
    has_place = engine.world.exchange([float(place is not None)])[0][0]
    if has_place:
        save(engine, place or Path(), progress.extra, engine.settings.keep)
        if problem := outcome(engine):
            raise CheckpointError(problem)
    if engine.world.rank == 0:
        what = f"saved step {progress.steps} in {place}" if has_place else "there is no directory to save in"
        print(f"asked to leave: {what}", file=sys.stderr, flush=True)
    engine.end()
    if engine.generation.servers:
        engine.generation.servers.close()
    raise SystemExit(local.EXIT_SAVED if has_place else local.EXIT_TERMINATED)


# Checkpoints


def save(engine: Engine, directory: Path, extra: dict[str, object], keep: int) -> None:
    began_s = time.monotonic()
    pause(engine, SAVE)
    write(engine, directory, extra, keep)
    telemetry.event("checkpoint", step=engine.progress.steps, stopped_s=time.monotonic() - began_s)


def write(engine: Engine, directory: Path, extra: dict[str, object], keep: int) -> None:
    """Save while all workers pause."""
    saving.save(engine, directory, extra, keep)
    engine.progress.directory, engine.progress.extra = directory, extra
    engine.progress.mark_saved()


def outcome(engine: Engine) -> str:
    """When all saves are over: why the last one is not on the disk, if it is not."""
    progress = engine.progress
    while (problem := engine.saver.outcome()) is None:
        write(engine, progress.directory or Path(), progress.extra, engine.settings.keep)
    return problem


def checkpoints(engine: Engine, directory: Path | str | None = None) -> Path:
    """The directory that a script has named, or the run's own."""
    if directory is not None:
        return Path(directory)
    if engine.settings.out is None:
        raise UsageError("without a run directory, name one: session.save(directory), or launch with --out")
    return engine.settings.out / "checkpoints"
