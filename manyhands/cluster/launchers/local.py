"""Worlds started by our own launcher: everything on which it and its workers must agree."""

import signal
from collections.abc import Mapping

from manyhands.cluster.launchers.rank_info import SERVERS, RankInfo, whole_number

RANK = "MANYHANDS_RANK"
SIZE = "MANYHANDS_SIZE"
MOST = "MANYHANDS_MOST"
"""How many workers there may be at once, where they may change."""
ARENA_FD = "MANYHANDS_ARENA_FD"
STORE = "MANYHANDS_STORE"
CORES = "MANYHANDS_CORES"
RUN_DIR = "MANYHANDS_RUN_DIR"
STRATEGY = "MANYHANDS_STRATEGY"
PLACEMENT = "MANYHANDS_PLACEMENT"
CODEC = "MANYHANDS_CODEC"
LAUNCHER_PID = "MANYHANDS_LAUNCHER_PID"
INVITATION = "MANYHANDS_INVITATION"
"""How to reach the coordinator, where the run has one."""
HOST = "MANYHANDS_HOST"
ADDRESS = "MANYHANDS_ADDRESS"
"""The host's number and its address, in a run that may have several hosts."""
NUMBER = "MANYHANDS_NUMBER"
"""The number by which people know this worker, where that is not its first rank."""
SERVES = "MANYHANDS_SERVES"
"""Set in a server, in a run that may have several hosts: how many it has on each may change."""
IS_NEW = "MANYHANDS_IS_NEW"
"""Set where the run has begun without this worker."""

ASK = signal.SIGUSR2
"""The launcher asks a worker to save and leave, when all are to leave."""
END = signal.SIGHUP
"""The launcher ends a worker at once."""
WHERE = signal.SIGRTMIN + 5
"""The launcher asks a process where it is: the handler writes the Python stack without the interpreter's lock."""
TERMINAL = "MANYHANDS_TERMINAL"
"""Set in a worker that has the launcher's terminal."""
STACK_FD = "MANYHANDS_STACK_FD"
"""The pipe into which a process writes it."""

EXIT_CRASHED = 1
EXIT_REFUSED = 2
EXIT_NO_SESSION = 64
"""Several workers have trained and none has made a session; EX_USAGE of sysexits.h."""
EXIT_PEER_LOST = 70
EXIT_LEFT = 71
"""A worker that was asked to leave has left; the run goes on without it."""
EXIT_SAVED = 75
"""All workers were asked to leave, and saved first; EX_TEMPFAIL of sysexits.h."""
EXIT_TERMINATED = 143
GOOD_ENDS = (0, EXIT_LEFT, EXIT_SAVED)

EXIT_REPORT = "\x1e"
"""A line of this and an exit code on standard error begins a worker's exit report: why it ends, with that code. The
launcher holds the report back, so that it shows an exception that all workers meet only once."""


def detect(environ: Mapping[str, str]) -> RankInfo | None:
    """The rank info that our launcher gave, if it did."""
    if RANK not in environ:
        return None
    first = whole_number(environ, RANK)
    number = whole_number(environ, NUMBER) if NUMBER in environ else first
    is_new = IS_NEW in environ
    workers = whole_number(environ, SIZE) - int(environ.get(SERVERS) or 0)
    rank = 0 if is_new else first
    store = environ.get(STORE)
    return RankInfo(
        rank=rank,
        size=whole_number(environ, SIZE),
        number=number,
        most_workers=whole_number(environ, MOST) if MOST in environ else workers,
        members=tuple(range(workers)) if INVITATION in environ else (),
        is_new=is_new,
        is_server=SERVES in environ,
        host=whole_number(environ, HOST) if HOST in environ else 0,
        address=environ.get(ADDRESS),
        launcher="manyhands",
        store=store,
        serves=store is not None and rank == 0,
        arena_fd=whole_number(environ, ARENA_FD) if ARENA_FD in environ else None,
    )
