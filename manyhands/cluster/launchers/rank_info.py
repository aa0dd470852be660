"""Which rank of which world a process is, as its launcher says."""

from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.errors import UsageError

SERVERS = "MANYHANDS_SERVERS"
"""How many of the processes that a launcher started are servers."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One process's place in the world."""

    rank: int
    size: int
    """All processes; the last `servers` of them are servers, the others workers."""
    launcher: str
    """`manyhands`, `torchrun`, `mpi`, `slurm` or `alone`."""
    store: str | None = None
    """Where workers meet, `host:port` (split it at the last colon); None where they need no network to meet."""
    serves: bool = False
    """Whether this rank opens the store's port itself; under torchrun the agent has already opened it."""
    arena_fd: int | None = None
    """Anonymous shared memory inherited from our own supervisor."""
    servers: int = 0
    number: int | None = None
    """By which people know this process, however often its rank changes; the rank where it is not given."""
    generation: int = 0
    members: tuple[int, ...] = ()
    """The numbers of all workers, by rank, where they may change."""
    most_workers: int | None = None
    """How many workers there may be at once, where they may change."""
    host: int = 0
    """By which the coordinator knows the host, where a run may have several."""
    address: str | None = None
    """Of this host, by which the others reach it; None in a run of one host."""
    hosts: tuple[int, ...] = ()
    """The hosts of all processes, by rank, in a run that may have several."""
    is_new: bool = False
    """Whether the run has begun without this worker, so that rank and size are not known yet."""
    is_server: bool = False
    """Of one that is new: whether it is a server."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise UsageError(
                f"{self.launcher} says rank {self.rank} of {self.size} workers; ranks go from 0 to size - 1. "
                "Start all workers with one launcher, or unset its variables to run alone."
            )
        if not 0 <= self.servers < self.size:
            raise UsageError(
                f"{self.servers} servers among {self.size} processes leave no worker; start more processes, or set "
                f"{SERVERS} to fewer servers."
            )

    @property
    def workers(self) -> int:
        return self.size - self.servers

    @property
    def rows(self) -> int:
        """How many workers the memory that they share with servers has room for; fewer may be there now."""
        return self.workers if self.most_workers is None else self.most_workers

    @property
    def server(self) -> int | None:
        """Which server this process is; None for a worker."""
        return self.rank - self.workers if self.rank >= self.workers else None

    @property
    def name(self) -> str:
        if self.is_server:
            return f"server {self.number}"
        if self.server is not None:
            return f"server {self.server}"
        return f"worker {self.known_as}"

    @property
    def known_as(self) -> int:
        """The number by which people know this worker."""
        return self.rank if self.number is None else self.number


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
