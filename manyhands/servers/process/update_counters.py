"""What a server counts over its whole life: updates, and how stale the gradients were."""

from collections import Counter, defaultdict, deque
from typing import Any

from manyhands import telemetry
from manyhands.servers.process.group_update import GroupUpdate
from manyhands.servers.protocol.messages import ServerReport

_REMEMBERED = 4096  # updates of a group whose authors the server knows


class UpdateCounters:
    """Counts of one server, through all generations of its workers."""

    def __init__(self) -> None:
        self._updates = 0
        self._staleness: Counter[int] = Counter()
        self._leads: Counter[int] = Counter()
        self._recorded_staleness: Counter[int] = Counter()
        self._recorded_leads: Counter[int] = Counter()
        self._begin()

    def _begin(self) -> None:
        self._authors: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def begin_generation(self) -> None:
        """Workers have other numbers now, so authors of earlier updates mean nothing."""
        self._begin()

    def note(self, update: GroupUpdate, version: int) -> None:
        """Count an update of a group that had `version` updates before."""
        clocks, authors = update.clocks, self._authors[update.group.index]
        for worker, gradient in zip(update.workers, update.gradients, strict=True):
            since = min(version - gradient.push.seen, len(authors))
            others = sum(authors[-1 - back] != clocks.team(worker) for back in range(since))
            self._staleness[others] += 1
            self._leads[clocks.lead(worker)] += 1
        authors.append(update.team)
        self._updates += 1

    def unrecorded(self) -> dict[str, Any]:
        """The counts since the last call, for the run's records; empty if there are none."""
        staleness, leads = self._staleness - self._recorded_staleness, self._leads - self._recorded_leads
        self._recorded_staleness, self._recorded_leads = self._staleness.copy(), self._leads.copy()
        return {"staleness": dict(staleness), "leads": dict(leads)} if staleness else {}

    def report(self) -> ServerReport:
        totals = telemetry.totals()
        return ServerReport(
            updates=self._updates,
            staleness=dict(self._staleness),
            leads=dict(self._leads),
            dropped=int(totals.get("frames_dropped", 0)),
            bytes_sent=int(totals.get("bytes_sent", 0)),
            bytes_received=int(totals.get("bytes_received", 0)),
        )
