"""What the supervisor asks of a run's membership, and the answers of a run whose workers do not change."""

from typing import Protocol

from manyhands.cluster.launcher.blame import RunFailure
from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launcher.processes import WorkerProcesses

LOST = "no worker is left that has the parameters"


class MembershipPolicy(Protocol):
    """Which deaths a run survives; `FixedMembership`, `Survival` and `HostAgent` are the variants."""

    @property
    def failed(self) -> RunFailure | None:
        """Why the run cannot go on, for a reason on another host, if there is one."""

    @property
    def waits_for(self) -> str:
        """What the processes of this host wait for, and without which they cannot go on; empty while they can."""

    @property
    def has_finished(self) -> bool:
        """Whether a worker has come to the end of its script."""

    def note_end(self, child: Child) -> bool:
        """A process has ended; says whether the run can go on after that."""

    def goes_on(self) -> bool:
        """Whether any worker runs or will."""

    def why(self, culprit: Child) -> str:
        """Why the run could not go on after the death of this process; empty where that says it all."""

    def tick(self, *, is_leaving: bool) -> None:
        """Start what is due, unless the workers were asked to leave; called several times a second."""

    def finish(self) -> None:
        """All processes of this host have ended."""


class FixedMembership:
    """The run survives no death."""

    failed = None
    waits_for = ""
    has_finished = False

    def __init__(self, processes: WorkerProcesses, workers: int) -> None:
        self._processes = processes
        self._workers = workers

    def note_end(self, child: Child) -> bool:
        return False

    def goes_on(self) -> bool:
        return self._processes.busy

    def why(self, culprit: Child) -> str:
        return LOST if self._workers == 1 and culprit.rank == 0 and culprit.code < 0 else ""

    def tick(self, *, is_leaving: bool) -> None:
        pass

    def finish(self) -> None:
        pass
