"""What the supervisor asks of a run's membership, and the answers of a run whose workers do not change."""

from typing import Protocol

from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launcher.processes import WorkerProcesses


class MembershipPolicy(Protocol):
    """Which deaths a run survives; `FixedMembership`, `Survival` and `HostAgent` are the variants."""

    @property
    def failed(self) -> str:
        """Why the run cannot go on, for a reason on another host; empty if there is none."""

    @property
    def has_finished(self) -> bool:
        """Whether a worker has come to the end of its script."""

    def note_end(self, child: Child) -> bool:
        """A process has ended; says whether the run can go on after that."""

    def goes_on(self) -> bool:
        """Whether any worker runs or will."""

    def tick(self) -> None:
        """Start what is due; called several times a second."""

    def finish(self) -> None:
        """All processes of this host have ended."""


class FixedMembership:
    """The run survives no death."""

    failed = ""
    has_finished = False

    def __init__(self, processes: WorkerProcesses) -> None:
        self._processes = processes

    def note_end(self, child: Child) -> bool:
        return False

    def goes_on(self) -> bool:
        return self._processes.busy

    def tick(self) -> None:
        pass

    def finish(self) -> None:
        pass
