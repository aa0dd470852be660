"""Every exception a person can meet.

Each message is one sentence with the numbers, the reason and the way out. The command line prints the
message alone; a traceback is for bugs, and these are not bugs.
"""

from collections.abc import Iterable


class ManyhandsError(Exception):
    """Anything manyhands says no to."""


class UsageError(ManyhandsError):
    """What was asked for cannot be done as asked."""


class UnknownName(UsageError):
    """A name that is in no table; the message lists the names that are."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")


class DataError(ManyhandsError):
    """A data set is missing, damaged or of the wrong form."""


class CheckpointError(ManyhandsError):
    """A checkpoint is missing, damaged or belongs to another model."""


class MemoryShort(ManyhandsError):
    """The machine does not have the memory that the run would need."""


class PeerLost(ManyhandsError):
    """Another worker of this run is gone."""


class TornUpdate(ManyhandsError):
    """A worker died in an update that the others cannot finish."""


class ServersLost(ManyhandsError):
    """Parameters that only servers had are gone with them."""


class Diverged(ManyhandsError):
    """Training has left the numbers: the loss or the parameters are not finite."""
