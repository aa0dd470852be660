"""Every exception a person can meet.

Each message is one sentence with the numbers, the reason and the way out. The command line prints the
message alone; a traceback is for bugs, and these are not bugs.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class ManyhandsError(Exception):
    """Anything manyhands says no to."""

    exit_code = 2
    """Of a command that ends by it."""


class UsageError(ManyhandsError):
    """What was asked for cannot be done as asked."""


class UnknownName(UsageError):
    """A name that is in no table; the message lists the names that are.

    `elsewhere` are names of other systems, and what they are called here.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
    ) -> None:
        names = sorted(known)
        said = f"unknown {kind} {name!r}; known: {', '.join(names)}"
        super().__init__(said + did_you_mean(name, names, elsewhere or {}))


def did_you_mean(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """The end of a sentence about an unknown name: what was probably meant, if that can be guessed."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    meant = elsewhere.get(plain) or " or ".join(difflib.get_close_matches(plain, list(known), 2, 0.7))
    return f"; did you mean {meant}?" if meant else ""


class DataError(ManyhandsError):
    """A data set is missing, damaged or of the wrong form."""


class CheckpointError(ManyhandsError):
    """A checkpoint is missing, damaged or belongs to another model."""


class MemoryShort(ManyhandsError):
    """The machine does not have the memory that the run would need."""


class PeerLost(ManyhandsError):
    """Another worker of this run is gone."""


class FirstHostLost(ManyhandsError):
    """The first host of a run was not heard of for too long."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


class TornUpdate(ManyhandsError):
    """A worker died in an update that the others cannot finish."""


class ServersLost(ManyhandsError):
    """Parameters that only servers had are gone with them."""


class Diverged(ManyhandsError):
    """Training has left the numbers: the loss or the parameters are not finite."""


class RunFailed(ManyhandsError):
    """A run that `mh.run` has started has failed in a worker."""

    def __init__(
        self, message: str, *, worker: int | None = None, traceback: str = "", results: Sequence[Any] = ()
    ) -> None:
        super().__init__(f"{message}\n\n{traceback}" if traceback else message)
        self.worker = worker
        """The rank of the worker that failed, if it was one."""
        self.traceback = traceback
        """What that worker printed at its end."""
        self.results = results
        """What the workers had returned by then."""
