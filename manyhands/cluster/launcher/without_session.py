"""Workers that never made a session: each of them ran the script by itself."""

from collections.abc import Callable

from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.processes import WorkerProcesses
from manyhands.cluster.launchers.host_page import TOLD_AT

_LINES = (
    "no worker hears of the others, and all write the same files; make a session in the script, "
    "`session = mh.session(model, optimizer, loss)`, and let it step, `session.step(batch)`, where now the script (or "
    "the Trainer of another library) calls backward and optimizer.step"
)


class WithoutSession:
    """Notes which workers of a run have made a session, and which have trained without one."""

    def __init__(self, processes: WorkerProcesses, workers: int, on_event: Callable[[Event], None]) -> None:
        self._processes = processes
        self._workers = workers
        self._on_event = on_event
        self._alone: set[int] = set()
        self._trained: set[int] = set()
        self._with_session = False
        self._has_told = False

    def tick(self) -> None:
        """Warn while the script runs, once."""
        if self._workers == 1 or self._with_session or self._has_told:
            return
        page, running = self._processes.page, [child.rank for child in self._processes.running]
        self._with_session = any(map(page.has_session, running))
        if not self._with_session and any(page.own_steps(row) >= TOLD_AT for row in running):
            self._has_told = True
            text = f"warning: {self._workers} workers train, each alone: {_LINES}"
            self._on_event(Event(kind="alone", text=text))

    def note_end(self, child: Child) -> None:
        """A process has ended; the launcher still has its row."""
        page = self._processes.page
        if page.has_session(child.rank):
            self._with_session = True
        elif child.code == 0:
            self._alone.add(child.rank)
            if page.own_steps(child.rank):
                self._trained.add(child.rank)

    def verdict(self) -> tuple[str, bool]:
        """What to say at the end, if anything, and whether the run has failed for it."""
        if self._workers == 1 or self._with_session or len(self._alone) < self._workers:
            return "", False
        if self._trained:
            return f"{len(self._trained)} workers have trained, each alone: {_LINES}", True
        return f"note: the script ran {len(self._alone)} times, each by itself: it made no session", False
