"""Records in, findings out."""

from collections.abc import Iterable
from pathlib import Path

from manyhands.diagnosis.evidence import ServerEvidence, WorkerEvidence
from manyhands.diagnosis.finding import Finding
from manyhands.diagnosis.learning_trouble import LossEvidence
from manyhands.diagnosis.surroundings import DeathsSeen, HostsSeen
from manyhands.diagnosis.time_lost import LEAST_STEPS, WorkersSeen, time_lost
from manyhands.telemetry.lines import Record
from manyhands.telemetry.read import read

_PAUSES = ("start", "evaluate", "checkpoint", "end")
_SERIOUS = ("diverging-loss", "rate-too-high", "dying-worker", "stale")  # the result is at stake: told first


class Diagnosis:
    """What has been recorded of a run so far, and what is wrong with it.

    With `recent`, findings about time are of the last hundred steps, as a person who watches wants them; otherwise of
    the whole run.
    """

    def __init__(self, *, recent: bool = False) -> None:
        self._recent = recent
        self._workers: dict[int, WorkerEvidence] = {}
        self._servers: dict[str, ServerEvidence] = {}
        self._server_names: dict[int, str] = {}  # by the rank that their records have
        self._loss, self._deaths, self._hosts = LossEvidence(), DeathsSeen(), HostsSeen()
        self._lockstep = True
        self.steps = 0
        """Of all workers together."""
        self._began_t: float | None = None
        self._last_t = 0.0

    def add(self, records: Iterable[Record]) -> None:
        """Take what has been recorded since the last call, in the order of time."""
        for record in records:
            kind = record["kind"]
            self._began_t = record["t"] if self._began_t is None else self._began_t
            self._last_t = max(self._last_t, record["t"])
            if kind == "step":
                self.steps += 1
                self._worker(record["rank"]).add_step(record)
                self._loss.add_step(record)
            elif kind in _PAUSES:
                self._worker(record["rank"]).pause()
                self._add_start(record)
            elif kind == "serves":
                self._server_names[record["rank"]] = f"server {record.get('server')}"
            elif kind == "serving":
                name = self._server_names.get(record["rank"], f"server of rank {record['rank']}")
                self._servers.setdefault(name, ServerEvidence()).add(record)
            elif kind == "updates":
                self._loss.add_updates(record)
            elif kind == "usage":
                self._hosts.add(record)
            elif kind == "death" or (kind == "server" and "how" in record):
                self._deaths.add(record)
            if kind in _CHANGES:
                for worker in self._workers.values():
                    worker.pause()

    def findings(self) -> list[Finding]:
        """What is wrong now: what spoils the result first, then what costs time, the costliest first."""
        sums = {number: worker.sums() for number, worker in self._workers.items()}
        told = {number: one for number, one in sums.items() if one.steps >= LEAST_STEPS}
        seen = WorkersSeen(sums=told, host_of=self._hosts.host_of, lockstep=self._lockstep)
        found = self._loss.findings() + self._deaths.findings(self._last_t - (self._began_t or 0.0))
        found += time_lost(seen, self._servers) + self._hosts.findings()
        return sorted(found, key=_order)

    def _worker(self, number: int) -> WorkerEvidence:
        if number not in self._workers:
            self._workers[number] = WorkerEvidence(recent=self._recent)
        return self._workers[number]

    def _add_start(self, record: Record) -> None:
        if record["kind"] == "start":
            self._loss.add_start(record)
            lockstep = record.get("lockstep")
            self._lockstep = lockstep if isinstance(lockstep, bool) else self._lockstep


_CHANGES = ("death", "host", "join", "leave", "again", "server")


def _order(finding: Finding) -> tuple[int, float]:
    """Others on the processor explain much and prove little: they come last."""
    place = 0 if finding.kind in _SERIOUS else 2 if finding.kind == "busy-host" else 1
    return place, -finding.share


def diagnose(run: Path) -> list[Finding]:
    """What is wrong with the run in that directory, over all of it."""
    diagnosis = Diagnosis()
    diagnosis.add(read(run))
    return diagnosis.findings()
