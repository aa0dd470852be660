"""How the processes of a run ended, and which of them is to blame where it failed."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launchers import local

# The launcher may see a worker that lost its peer end before the peer itself: it waits this long for the cause.
_BLAME_S = 0.5

_CAUSE, _TOLD, _LOST_A_PEER = range(3)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a world ended."""

    ok: bool
    exit_code: int
    message: str
    rank: int | None = None
    """The process that died first, where one did; servers count after the workers."""
    process: str = ""
    """What that process is called, as in the name of its log."""
    tail: tuple[str, ...] = ()
    """The last lines of that worker's traceback or standard error."""
    note: str = ""
    """What a person should know of a run that has ended well."""
    unsaved: str = ""
    """Why a run that was asked to save has not."""
    step: int = 0
    """How far the run had come."""
    waited_for: str = ""
    """What this host waited for when a signal ended it."""
    is_lost: bool = False
    """Whether nothing is left that the run could go on from but a checkpoint."""


@dataclass(frozen=True)
class RunFailure:
    """Why a run cannot go on, for a reason on another host, and the exit code of this launcher then."""

    message: str
    exit_code: int


def blame_order(child: Child) -> int:
    """0 for a process that died by itself, more for one that was told to end or that lost its peer."""
    if child.code == local.EXIT_PEER_LOST:
        return _LOST_A_PEER
    told = (local.EXIT_TERMINATED, -signal.SIGTERM, -local.ASK, -local.END)
    return _TOLD if child.code in told else _CAUSE


def was_told_to_end(child: Child) -> bool:
    return blame_order(child) == _TOLD


class Exits:
    """The processes that have ended so far: those whose death ends the run, and those that the run survived."""

    def __init__(self) -> None:
        self.codes: set[int] = set()
        self.deaths: list[Child] = []
        self.survived: list[Child] = []
        self._blame_at_s = 0.0

    def add_deaths(self, new: Sequence[Child]) -> None:
        if new and not self.deaths:
            self._blame_at_s = time.monotonic() + _BLAME_S
        # Of those that ended at the same time, a signal is a cause and an exit code perhaps its consequence.
        self.deaths += sorted(new, key=lambda child: child.code > 0)

    @property
    def has_cause(self) -> bool:
        """Whether one of the deaths is not the consequence of another."""
        return any(blame_order(child) == _CAUSE for child in self.deaths)

    def is_decided(self) -> bool:
        """Whether the run ends now, since the cause is known or has not shown up in time."""
        return bool(self.deaths) and (self.has_cause or time.monotonic() >= self._blame_at_s)

    def culprit(self, *, has_finished: bool) -> Child | None:
        """The first death that is not another's consequence; None if the run has ended well.

        Where workers only lost a peer, or no worker could go on, the peer that they lost last is to blame.
        """
        suspects = self.deaths
        if (self.deaths or not has_finished) and not self.has_cause:
            suspects = [*reversed(self.survived), *self.deaths]
        return min(suspects, key=blame_order, default=None)
