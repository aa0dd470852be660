"""Worlds started by our own supervisor: everything on which it and its workers must agree."""

from collections.abc import Mapping

from manyhands.cluster.seat import Seat, whole_number

RANK = "MANYHANDS_RANK"
SIZE = "MANYHANDS_SIZE"
ARENA_FD = "MANYHANDS_ARENA_FD"
STORE = "MANYHANDS_STORE"
CORES = "MANYHANDS_CORES"
RUN_DIR = "MANYHANDS_RUN_DIR"
STRATEGY = "MANYHANDS_STRATEGY"
PLACEMENT = "MANYHANDS_PLACEMENT"
LAUNCHER_PID = "MANYHANDS_LAUNCHER_PID"

EXIT_CRASHED = 1
EXIT_REFUSED = 2
EXIT_PEER_LOST = 70
EXIT_TERMINATED = 143

LAST_WORDS = "\x1e"
"""A line of this on standard error says: what follows is why this worker ends. The supervisor keeps it back,
so that an exception that all workers meet at once is shown once."""


def detect(environ: Mapping[str, str]) -> Seat | None:
    """The seat that our supervisor gave, if it did."""
    if RANK not in environ:
        return None
    rank = whole_number(environ, RANK)
    store = environ.get(STORE)
    return Seat(
        rank=rank,
        size=whole_number(environ, SIZE),
        launcher="manyhands",
        store=store,
        serves=store is not None and rank == 0,
        arena_fd=whole_number(environ, ARENA_FD) if ARENA_FD in environ else None,
    )
