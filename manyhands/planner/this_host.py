"""The facts of this host and a job: from a probe that was kept, where it holds, else measured now."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from manyhands.comm.transports.free_memory import available_bytes
from manyhands.planner import kept_probes, predictions
from manyhands.planner.explain import duration
from manyhands.planner.facts import ClusterFacts, Facts, HostsOfKind
from manyhands.planner.measure import HostProbe, ProbedJob, Report, probe_host


@dataclass(frozen=True, kw_only=True)
class HostMeasured:
    """A probe, and where it comes from."""

    probe: HostProbe
    job: str
    """By which the ledger of predictions knows the job."""
    host: str
    why_measured: str
    """Why it was measured now; empty where it was kept."""

    @property
    def was_kept(self) -> bool:
        return not self.why_measured

    def facts(self, strategy: str | None = None) -> Facts:
        """As a search wants them, with what is known of past predictions for this strategy."""
        probe = self.probe
        host = msgspec.structs.replace(probe.host, memory_bytes=available_bytes())
        return Facts(
            model=probe.model,
            cluster=ClusterFacts(hosts=(HostsOfKind(host=host),)),
            batch=probe.batch,
            indistinct=probe.indistinct,
            past_error=self.learned(strategy).spread if strategy else 0.0,
            notes=(*probe.notes, *self._age()),
        )

    def _age(self) -> tuple[str, ...]:
        """What a person should know who has changed something since."""
        if not self.was_kept:
            return ()
        ago = duration(max(1.0, time.time() - self.probe.made_at))
        return (f"this host was measured with this job {ago} ago; `manyhands probe` measures it again",)

    def learned(self, strategy: str) -> predictions.Learned:
        return predictions.learned(self.host, self.job, strategy)


def measured(
    job: ProbedJob,
    *,
    workers: int | None = None,
    threads: int | None = None,
    anew: bool = False,
    report: Report = lambda what, done, total: None,
    on_measure: Callable[[str], None] = lambda why: None,
) -> HostMeasured:
    """`workers` and `threads` hold those fixed; `on_measure` hears why nothing that was kept will do."""
    known = kept_probes.known_by(job, {"workers": workers, "threads": threads})
    found = (
        kept_probes.ProbeLookup(probe=None, why_not="it was asked for") if anew else kept_probes.find(known)
    )
    probe = found.probe
    if probe is None:
        on_measure(found.why_not)
        probe = probe_host(job, workers=workers, threads=threads, report=report)
        kept_probes.keep(known, probe)
    return HostMeasured(
        probe=probe, job=_digest(known["job"]), host=_digest(known["host"]), why_measured=found.why_not
    )


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
