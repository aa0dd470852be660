"""Which rank of which world this process is, as told by whoever started it.

The same script runs under our own supervisor, torchrun, MPI, Slurm, or alone; each launcher leaves its own
variables, and each launcher module reads only its own.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One process's place in the world."""

    rank: int
    size: int
    launcher: str
    """`manyhands`, `torchrun`, `mpi`, `slurm` or `alone`."""
    store: str | None = None
    """Where workers meet, `host:port` (split it at the last colon); None where nobody needs to meet."""
    serves: bool = False
    """Whether this rank opens the store's port itself; under torchrun the agent has already opened it."""
    arena_fd: int | None = None
    """Anonymous shared memory inherited from our own supervisor."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise UsageError(
                f"{self.launcher} says rank {self.rank} of {self.size} workers; ranks go from 0 to size - 1. "
                "Start all workers with one launcher, or unset its variables to run alone."
            )


def find_seat(environ: Mapping[str, str] = os.environ) -> Seat:
    """Ask every launcher in turn; call it once per process, since under MPI it is a collective act."""
    # The launchers build seats, so they import this module; importing them here breaks the circle.
    from manyhands.cluster.launchers import DETECTORS

    for detect in DETECTORS:
        seat = detect(environ)
        if seat is not None:
            return seat
    return Seat(rank=0, size=1, launcher="alone")


@functools.cache
def own_seat() -> Seat:
    """This process's seat, found once."""
    return find_seat()


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """A variable that must be there and must be a whole number."""
    text = environ.get(name)
    if text is None:
        raise UsageError(
            f"{name} is not set although its companions are; start all workers with one launcher."
        )
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number; it is set by the launcher.") from None


def master(environ: Mapping[str, str]) -> str | None:
    """`MASTER_ADDR:MASTER_PORT`, by which a person names the meeting place under any launcher."""
    if "MASTER_ADDR" not in environ and "MASTER_PORT" not in environ:
        return None
    if not environ.get("MASTER_ADDR"):
        raise UsageError(f"MASTER_PORT={environ['MASTER_PORT']} is set but MASTER_ADDR is not; set both.")
    port = whole_number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port} is not a port; ports go from 1 to 65535.")
    return f"{environ['MASTER_ADDR']}:{port}"
