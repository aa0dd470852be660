"""This process in its run: it joins once, may make sessions, and leaves at exit."""

import atexit
import os
import sys
import weakref
from pathlib import Path
from typing import Protocol

from manyhands import telemetry
from manyhands.checkpoint import background_write
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.worker import children, entry, own_steps, rank_variables
from manyhands.cluster.worker.heap import keep_freed_memory
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World, join
from manyhands.engine.join import first_world, membership
from manyhands.errors import ManyhandsError, PeerLost


class OpenSession(Protocol):
    """What the process asks of its sessions."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def out(self) -> Path | None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def wait_for_saves(self) -> None: ...


_world: World | ServerContext | None = None
_member: Member | None = None
# In the order in which they were made, the same on all workers.
_sessions: list[weakref.ref[OpenSession]] = []
# In a run of several processes: a session that only a function's variable holds is finished with the others, too.
_kept: list[OpenSession] = []


def rank() -> int:
    """The rank of this worker, also before a session exists: which data to prepare, who prints.

    A worker that joins a run later gets its rank with its session; until then it is the number by which people know it.
    Servers count after the workers.
    """
    if isinstance(_world, World):
        return _world.rank
    info = own_rank_info()
    return info.rank if not info.is_new or info.number is None else info.number


def workers() -> int:
    """How many workers there are, also before a session exists; of several hosts, until then, those of this one."""
    return _world.size if isinstance(_world, World) else own_rank_info().workers


def own_world() -> World | ServerContext:
    """The world of this process: joined once, left at exit."""
    global _world, _member
    children.refuse()
    if _world is None:
        children.announce()
        keep_freed_memory()
        own_steps.end()
        _member = membership(os.environ)
        _world = first_world(_member) if _member else join()
        _announce(_world)
        atexit.register(_leave, os.getpid())
        entry.before_termination.append(background_write.abandon_all)
    return _world


def own_member() -> Member | None:
    """This process as a member of a run whose members may change; None before it has joined, or where it is not."""
    return _member


def move(old: World, new: World) -> None:
    """A session of this process has entered another generation."""
    global _world
    if _world is old:
        _world = new
        _announce(new)


def _announce(world: World | ServerContext) -> None:
    """Say in the environment which worker this is now."""
    if isinstance(world, World):
        rank_variables.announce(world.rank, world.size, world.host.index, world.host.size)


def host_count() -> int:
    """On how many hosts the workers of this run are."""
    world = own_world()
    return len(world.neighbours.workers(world.rank_info))


def worker_count() -> int:
    """How many workers there are in this run."""
    return own_world().rank_info.workers


def register(session: OpenSession) -> None:
    """At exit, this process finishes the session if it is still open."""
    _sessions.append(weakref.ref(session))
    _kept[:] = [one for one in _kept if not one.is_closed]
    if own_rank_info().launcher != "alone":
        _kept.append(session)


def open_sessions() -> list[OpenSession]:
    """The sessions of this process that are not closed."""
    known = (reference() for reference in _sessions)
    return [session for session in known if session is not None and not session.is_closed]


def close_sessions() -> None:
    """Close what the script has left open, in the order in which it was made."""
    for session in open_sessions():
        session.close()


def _leave(pid: int) -> None:
    """At exit: wait for the other workers, unless this process ends because of an error or is a fork of the worker."""
    global _world
    if os.getpid() != pid:
        return
    problem: ManyhandsError | None = None
    end = getattr(sys, "last_value", None)
    if end is None:
        try:
            for session in open_sessions():
                session.finish()
        except (PeerLost, SystemExit):
            pass  # the worker that died says why; the process that ended this one knows
        except ManyhandsError as error:
            problem = error
    for session in open_sessions():
        session.wait_for_saves()  # what was copied before an error is as good as ever
    if _world is not None:
        _world.close()
        _world = None
    is_good = end is None or (isinstance(end, SystemExit) and end.code in local.GOOD_ENDS)
    if _member is not None and is_good and not problem:
        _member.close()  # else the others would go on without it, as if no error had ended the run
    if problem:
        entry.refuse(problem, local.EXIT_REFUSED)
        telemetry.close()
        os._exit(local.EXIT_REFUSED)  # at this point an exception would no longer change the exit code
