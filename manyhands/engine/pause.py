"""What is not a step: all workers come together, and their replicas agree, before any of them goes on."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from manyhands import telemetry
from manyhands.cluster.launchers import local
from manyhands.data.ledger import Assignment, DrawnOrder, Ranges
from manyhands.data.streams import Stream
from manyhands.engine import habits, lower_level, pace, same_bits, siblings
from manyhands.engine import handshake as handshakes
from manyhands.engine import save as saving
from manyhands.engine.collecting import collect, nothing
from manyhands.engine.engine import Engine
from manyhands.engine.feed import Feed
from manyhands.engine.feeds import Feeds
from manyhands.engine.handshake import (
    BEGIN,
    COLLECT,
    END_OF_DATA,
    LEAVE,
    OWN_LOOP,
    SAVE,
    SAVE_NOW,
    Answers,
)
from manyhands.engine.step import look_up, run, transaction_of
from manyhands.engine.step_input import NO_WORK
from manyhands.errors import CheckpointError, UsageError
from manyhands.replica.share import Share
from manyhands.replica.state import buffers
from manyhands.strategies.interface import Served

_APART = 1e-4  # of the norm of the parameters: far above rounding


def pause(engine: Engine, purpose: int) -> None:
    """All workers are here; parameters and buffers are the same everywhere."""
    engine.clock.stop()
    gather(engine, purpose)
    agree(engine)
    same_bits.hold(engine)
    if engine.replica.runs_whole:
        _not_apart(engine)
    engine.siblings.joint.even_out(engine.world)
    differed = buffers.average(engine.replica.part.buffers(), engine.placed.observers)
    habits.speak_of_buffers(engine, differed)
    engine.keep_copies()


def _not_apart(engine: Engine) -> None:
    """An optimizer that runs whole must do the same on every worker; another processor may round otherwise."""
    every = [values.double() for values in engine.replica.flat.values()]
    norm = math.hypot(*(float(values.norm()) for values in every))
    rows = engine.world.exchange([norm, sum(float(values.sum()) for values in every)])
    for rank, row in enumerate(rows):
        difference = max(abs(mine - theirs) for mine, theirs in zip(row, rows[0], strict=True))
        if difference > _APART * (1.0 + rows[0][0]):
            raise UsageError(
                f"{type(engine.training.optimizer).__name__} has led the workers apart: the norm of the parameters is "
                f"{rows[0][0]:g} on worker 0 and {row[0]:g} on worker {rank}; it uses what differs between workers, as "
                "activations or random numbers do: make that the same on all"
            )


def gather(engine: Engine, purpose: int, ends: Feed | None = None) -> Answers:
    """Take part in the other workers' steps, without data, until all workers have come for the same thing: if it is the
    end of a stream, of any."""
    progress, feeds, lockstep = engine.progress, engine.feeds, engine.traits.lockstep
    while True:
        if not lockstep:
            look_up(engine)
        for sibling in engine.siblings.open:
            if sibling.has_entered and not sibling.traits.lockstep:
                _leave(sibling)
        if not lockstep and not engine.traits.late:
            _publish(engine)
        while progress.commits < progress.alone_until:
            run(engine, NO_WORK, None)
        handshake = handshakes.begin(engine, purpose, ends=ends)
        answers = handshake.wait()
        stepping = handshake.engine
        if handshakes.BACKWARD in answers.purposes and handshakes.UPDATE not in answers.purposes:
            lower_level.take_part(stepping, handshake)
        elif handshakes.STEP in answers.purposes or handshakes.UPDATE in answers.purposes:
            run(stepping, NO_WORK, handshake)
            if not engine.siblings.puts_off(answers.asked):
                answer(engine, answers.asked)
        elif answers.asked > engine.answering:
            answer(engine, answers.asked)
        elif handshakes.COLLECT in answers.purposes and answers.are_only(COLLECT, END_OF_DATA):
            if purpose == COLLECT:
                break
            collect(engine, b"", nothing)  # a worker that is out of data has nothing to add
        elif answers.agree():
            break
    for feed, drawn in zip(feeds.slots, answers.drawn, strict=True):
        if feed.is_under_way:
            feed.note(drawn)
    engine.change_is_due = answers.change
    if not lockstep and purpose != COLLECT:  # which workers that are out of data do not come for
        _count_together(engine, answers)
    return answers


def _publish(engine: Engine) -> None:
    """Where workers do not wait for each other: what this worker has used so far survives its death."""
    if engine.generation.used:
        engine.generation.used.publish(engine.feeds.progress)


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


def _count_together(engine: Engine, answers: Answers) -> None:
    """Where each worker has counted by itself: what all of them have done."""
    progress = engine.progress
    pace.catch_up(engine, answers)
    row = [float(progress.uncounted), float(progress.parted), float(progress.position), *pace.row(engine)]
    rows = engine.world.exchange([*row, *_steps_of_all(engine)])
    pace.level(engine, [one[3 : len(row)] for one in rows])
    others = sum(int(row[0]) for row in rows) - progress.uncounted
    progress.samples += others
    engine.clock.add(others)
    progress.uncounted = 0
    progress.parted = any(row[1] for row in rows)
    progress.position = int(min(row[2] for row in rows))  # the slowest worker still has the rest
    most = [int(max(steps)) for steps in zip(*(one[len(row) :] for one in rows), strict=True)]
    for one in engine.siblings.open:
        one.progress.most_steps = most[engine.siblings.place_of(one)]
    engine.feeds.commit()


def _steps_of_all(engine: Engine) -> list[float]:
    """Of this worker's sessions, by their places: they go on together."""
    steps = [0.0] * siblings.MOST
    for one in engine.siblings.open:
        steps[engine.siblings.place_of(one)] = float(one.progress.steps)
    return steps


def agree(engine: Engine) -> None:
    """The parameters of all replicas are the same from here on, and what was learned is safe."""
    progress, feeds, world = engine.progress, engine.feeds, engine.world
    if not progress.parted:
        return

    def finish(loss: float) -> None:
        progress.parted = False
        progress.commits += 1
        feeds.commit()

    with transaction_of(engine, finish, is_joint=True):
        engine.strategy.agree(engine.replica, engine.generation.fleet or engine.comm)
        if engine.member:
            world.exchange([])  # hosts, too, must not be more than this apart
        else:
            world.host.barrier()


# The beginning and the end of a loop


def agree_on_order(engine: Engine, stream: Stream) -> DrawnOrder:
    """The order of an epoch that a sampler draws: that of worker 0 holds on all."""
    if engine.has_entered:
        gather(engine, BEGIN)
    drawn = stream.draw() if engine.world.rank == 0 else None
    said = engine.world.gather(drawn.encode().encode() if drawn is not None else b"")[0]
    return DrawnOrder.decode(said.decode())


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """Where a loop was when it was begun, or given more: at its end it may be behind."""

    calls: int
    ends: int
    assignment: Assignment | None = None


def end_of_data(engine: Engine, feed: Feed, began: LoopState) -> None:
    """Wait for all workers; if members have changed since, there may be more to do for this worker."""
    if _is_behind(engine, feed, began.calls):
        return
    if feed.ends > began.ends or feed.assignment is not began.assignment:
        return
    feed.settle_passed()
    feed.waiting = 0
    _end_loops(engine, feed)


def end_of_own_data(engine: Engine, loop: object, calls: int) -> None:
    """The same for batches that only this worker has."""
    if not _is_behind(engine, loop, calls):
        _end_loops(engine, loop)


def _is_behind(engine: Engine, loop: object, calls: int) -> bool:
    """Whether the other workers had all that they needed of this one, or this end has come already."""
    progress = engine.progress
    if progress.caught_up_at > calls and engine.feeds.outermost is loop:
        progress.calls = calls + 1
    return progress.calls > calls or progress.caught_up_at > calls


def _end_loops(engine: Engine, loop: object) -> None:
    """End this loop, and before it those inside of which other workers still are."""
    feeds = engine.feeds
    own = loop if isinstance(loop, Feed) else None
    while True:
        slots = gather(engine, END_OF_DATA, own).slots
        first = min(slots, key=lambda slot: _depth(feeds, slot))
        ended = None if first == OWN_LOOP else feeds.slots[first]
        if engine.member:
            agree(engine)  # an epoch is over when what was learned in it is safe
            same_bits.hold(engine)
        feeds.commit()
        if ended is None or ended.is_complete or ended.is_abandoned:
            if ended is not None:
                feeds.end_epoch(ended, notes(engine, ended))
            if feeds.outermost is loop and ended is own:
                _end_epoch(engine, ended)
        else:
            takers = [feed for feed, slot in enumerate(slots) if slot == first]
            ended.assign(len(slots), takers=takers if len(takers) < len(slots) else ())
        if ended is own:
            return


def _depth(feeds: Feeds, slot: int) -> tuple[int, int]:
    """Loops inside of others end before these."""
    if slot == OWN_LOOP:
        return 1, 0
    return (2, -slot) if feeds.slots[slot].is_main else (0, -slot)


def _end_epoch(engine: Engine, ended: Feed | None) -> None:
    progress = engine.progress
    is_alone = (
        ended is not None and len(engine.feeds.slots) == 1
    )  # else there were more samples than those of the epoch
    progress.end_epoch(ended.length if ended is not None and is_alone else None)
    if ended is not None:  # else each has made those of its own batches
        for one in engine.siblings.open:
            one.progress.steps = max(one.progress.steps, one.progress.most_steps)
    if engine.save_every and engine.save_every.is_due_after_epoch(progress):
        answer(engine, SAVE_NOW)


def notes(engine: Engine, feed: Feed) -> list[Ranges]:
    """The samples that the steps of each worker have used in an epoch."""
    used = feed.audit.used if engine.placed.counts else []
    said = engine.world.gather(msgspec.json.encode(used))
    return [msgspec.json.decode(row, type=Ranges) for row in said]


# What workers ask each other for


def answer(engine: Engine, asked: int) -> None:
    """Do what a worker has asked for, with all sessions; all workers do it at the same point."""
    if asked <= engine.answering:
        return
    every = [one for one in engine.siblings.open if one.has_entered]
    before = [one.answering for one in every]
    for one in every:
        one.answering = asked
    try:
        if asked == LEAVE:
            _save_and_leave(engine, every)
        for one in every:
            if one is engine or _place(one) is not None:
                save(one, _place(one) or checkpoints(one), one.progress.extra, one.settings.keep)
    finally:
        for one, value in zip(every, before, strict=True):
            one.answering = value


def _save_and_leave(engine: Engine, every: Sequence[Engine]) -> NoReturn:
    """The machine is about to be taken away."""
    places = [_place(one) for one in every]
    has_place = all(engine.world.exchange([float(place is not None) for place in places])[0])
    for one, place in zip(every if has_place else (), places, strict=False):
        save(one, place or Path(), one.progress.extra, one.settings.keep)
    if problem := next((found for one in every if (found := outcome(one))), "") if has_place else "":
        raise CheckpointError(problem)
    if engine.world.rank == 0:
        said = (f"step {one.progress.steps} in {place}" for one, place in zip(every, places, strict=True))
        what = f"saved {', '.join(said)}" if has_place else "there is no directory to save in"
        print(f"asked to leave: {what}", file=sys.stderr, flush=True)
    for one in every:
        one.end()
        if one.generation.servers:
            one.generation.servers.close()
    raise SystemExit(local.EXIT_SAVED if has_place else local.EXIT_TERMINATED)


def _place(engine: Engine) -> Path | None:
    """Where a session saves by itself."""
    out = engine.settings.out
    return engine.progress.directory or (
        out / engine.siblings.name_of(engine, "checkpoints") if out else None
    )


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
        for other in engine.siblings.besides(engine):
            if other.progress.directory == Path(directory):
                raise UsageError(
                    f"session {other.number + 1} saves in {directory}, and this is session {engine.number + 1}; give "
                    "each session a directory of its own"
                )
        return Path(directory)
    if engine.settings.out is None:
        raise UsageError("without a run directory, name one: session.save(directory), or launch with --out")
    return engine.settings.out / engine.siblings.name_of(engine, "checkpoints")
