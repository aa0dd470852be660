"""The end of a session: all workers wait for each other, save what is not saved, and count what all have done."""

import contextlib
from pathlib import Path

from torch import Tensor

from manyhands import telemetry
from manyhands.cluster.worker import leaving
from manyhands.engine import habits, pause, save
from manyhands.engine.engine import Engine, Totals
from manyhands.engine.handshake import FINISH
from manyhands.engine.step import survive, together
from manyhands.engine.summary import own_bytes, summarize, write_summary
from manyhands.errors import CheckpointError, PeerLost
from manyhands.servers.worker import saved_state
from manyhands.servers.worker.reports import report, staleness


def close(engine: Engine) -> None:
    """Finish, and leave the model usable by itself."""
    if engine.failure and engine.has_entered:
        if engine.pending is not None:
            engine.pending.keep()
        engine.replica.let_go()  # its hooks would keep the host's memory open as long as the model lives
        engine.siblings.joint.leave(engine.number)
        engine.script.leave()
    if engine.is_closed or engine.failure:
        return
    if not engine.has_entered:
        engine.end()  # a session that has done nothing
        return
    unsaved = _end(engine)
    with engine.placed.at_work():
        model = survive(engine, lambda: _give_back(engine))
        engine.replica.part.elsewhere = engine.siblings.trained_besides(engine)
        with contextlib.suppress(*((PeerLost,) if engine.member else ())):
            engine.replica.release()
            if engine.generation.part_copies is not None:
                engine.generation.part_copies.release()
        engine.replica.part.become_whole(model)
    _leave_servers(engine, unsaved)


def _give_back(engine: Engine) -> dict[str, Tensor]:
    tensors, states = save.collect(engine)
    if engine.served and engine.placed.is_whole:
        tensors, states = saved_state.told_by_first(tensors, states, engine.world)
    engine.script.leave()
    return engine.placed.give_back(engine.replica, tensors, states)


def finish(engine: Engine) -> None:
    """Wait for all workers and write the summary."""
    if not engine.is_closed and not engine.failure and engine.has_entered:
        unsaved = _end(engine)
        _leave_servers(engine, unsaved)


def _end(engine: Engine) -> str:
    """Returns why the last save is not on the disk, if it is not."""
    habits.leave(engine)
    unsaved = together(engine, lambda: _end_together(engine))
    name = engine.siblings.name_of(engine, "summary")
    engine.end()
    out = engine.settings.out
    if out and engine.world.rank == 0:
        write_summary(out, summarize(engine), name)
    others = engine.siblings.open
    if not others:
        leaving.stop_listening()
    if out and not any(other.settings.out == out for other in others):
        telemetry.close()  # now what it has recorded is on the disk
    return unsaved


def _end_together(engine: Engine) -> str:
    progress = engine.progress
    pause.pause(engine, FINISH)
    is_unsaved = engine.save_every is not None and progress.steps != progress.saved_steps
    if any(row[0] for row in engine.world.exchange([float(is_unsaved)])):
        place: Path = progress.directory or pause.checkpoints(engine)
        pause.write(engine, place, progress.extra, engine.settings.keep)
    unsaved = pause.outcome(engine)
    for feed in engine.feeds.under_way():
        engine.feeds.end(feed, pause.notes(engine, feed))
    engine.totals = _count(engine)
    return unsaved


def _count(engine: Engine) -> Totals:
    """Add up what all workers and servers have counted."""
    rows = engine.world.exchange([*own_bytes()])
    bytes_sent, shared_bytes = (sum(column) for column in zip(*rows, strict=True))
    if not engine.served:
        return Totals(bytes_sent, shared_bytes, None)
    reports = report(engine.generation.servers, engine.world)
    bytes_sent += sum(one.bytes_sent for one in reports)
    return Totals(bytes_sent, shared_bytes, staleness(reports))


def _leave_servers(engine: Engine, unsaved: str) -> None:
    """Everything is done, except perhaps a save that failed."""
    if engine.generation.servers:
        engine.generation.servers.close()
    if unsaved:
        raise CheckpointError(unsaved)
