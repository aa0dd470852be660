"""`--strategy auto`, `--workers auto`, `--threads auto`: measure or remember, choose, and hold the run against it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manyhands.planner import predictions, splits, this_host
from manyhands.planner.candidates import WayLimits
from manyhands.planner.measure import ProbedJob, Report
from manyhands.planner.predictions import PredictedRun, PredictedStep
from manyhands.planner.search import Choice, search
from manyhands.planner.this_host import HostMeasured
from manyhands.telemetry.lines import number
from manyhands.telemetry.read import read

LEAST_STEPS = 30
"""Of a run that is held against its prediction: the first ones are slower."""
_TERMS = {"compute": "compute", "exchange": "exchange", "wait": "waiting", "update": "update"}
"""What workers record, and what the price calls it."""


@dataclass(frozen=True, kw_only=True)
class AutoWords:
    """Which words are left open, and what the others say."""

    auto: tuple[str, ...]
    strategy: str
    placement: str
    workers: int
    threads: int | None
    servers: int = 0
    optimizer: str | None = None

    def held(self) -> tuple[int | None, int | None]:
        """Workers and threads that a probe holds fixed; threads that are not named follow from the workers."""
        workers = None if "workers" in self.auto else self.workers
        threads = None if "threads" in self.auto else self.threads
        if workers is not None and threads is None and "threads" not in self.auto:
            threads = max(1, (splits.usable_cores() - self.servers) // workers)
        return workers, threads

    def wanted(self) -> WayLimits:
        workers, threads = self.held()
        is_open = "strategy" in self.auto
        return WayLimits(
            strategy=None if is_open else self.strategy,
            placement=self.placement,
            workers=workers,
            threads=threads,
            servers=self.servers or None,
            optimizer=self.optimizer,
            alike_only=is_open,
        )


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What will run, and what is expected of it."""

    strategy: str
    workers: int
    threads: int
    servers: int
    predicted: PredictedStep
    samples: float
    """Of all workers in a step."""
    measured: HostMeasured
    choice: Choice

    @property
    def way(self) -> str:
        return str(self.choice.best.way)

    def why(self) -> str:
        """One line for a person."""
        best, probe = self.choice.best, self.measured.probe
        low, high = self.rates()
        rate = self.samples / self.predicted.step_s
        said = f"auto      {self.way}: {rate:,.0f} samples/s predicted ({low:,.0f} to {high:,.0f})"
        others = [each for each in self.choice.table if str(each.way.hosts) != str(best.way.hosts)]
        if others:
            said += f"; {others[0].way} would make {others[0].rate:,.0f}"
        if not self.choice.is_clear:
            said += f"; the simplest of {len(self.choice.ties)} that cannot be told apart"
        where = "measured before" if self.measured.was_kept else f"measured in {probe.took_s:.0f} s"
        return f"{said}; {where}"

    def rates(self) -> tuple[float, float]:
        return self.samples / self.predicted.high_s, self.samples / self.predicted.low_s


def choose(
    job: ProbedJob, words: AutoWords, report: Report = lambda what, done, total: None, **more: Any
) -> Chosen:
    """Probe this host with the job, or take the probe that was kept, and search; `more` is for `this_host.measured`."""
    workers, threads = words.held()
    found = this_host.measured(job, workers=workers, threads=threads, report=report, **more)
    choice = search(found.facts(), words.wanted())
    best = choice.best
    learned = found.learned(best.way.strategy)  # facts() of it would widen twice
    slowest, fastest = (best.samples / rate for rate in best.interval())
    predicted = PredictedStep(step_s=best.seconds, low_s=fastest, high_s=slowest, terms_s=dict(best.terms))
    split = best.way.hosts[0]
    return Chosen(
        strategy=best.way.strategy,
        workers=split.processes,
        threads=split.threads,
        servers=best.way.servers,
        predicted=learned.applied(predicted),
        samples=best.samples,
        measured=found,
        choice=choice,
    )


# After the run


def held_against(chosen: Chosen, out: Path, summary: Mapping[str, Any]) -> str:
    """Write prediction and measurement into the run's summary and both ledgers; returns the line for a person."""
    rate = float(summary.get("samples_per_second") or 0.0)
    low, high = chosen.rates()
    expected = (
        f"predicted {chosen.samples / chosen.predicted.step_s:,.0f} samples/s ({low:,.0f} to {high:,.0f})"
    )
    if int(summary.get("steps") or 0) < LEAST_STEPS or rate <= 0 or math.isnan(rate):
        return f"{expected}; a run of fewer than {LEAST_STEPS} steps says nothing of it"
    run = predictions.compared(
        chosen.predicted,
        chosen.way,
        {"host": chosen.measured.host, "job": chosen.measured.job, "strategy": chosen.strategy},
        {"step": chosen.samples / rate, **terms_of(out)},
    )
    predictions.record(run, out)
    _amend(out, summary, chosen, run)
    return f"{expected}, measured {rate:,.0f}: {_verdict(run)}"


def _verdict(run: PredictedRun) -> str:
    if run.is_inside:
        return "inside the interval"
    worst = run.wrong_term()
    said = f"outside, {math.exp(abs(run.log_ratio)):.2f} times {'slower' if run.log_ratio > 0 else 'faster'}"
    if worst:
        name, predicted_s, measured_s = worst
        said += f"; furthest off: {name}, {predicted_s * 1e3:.3g} ms a step predicted, {measured_s * 1e3:.3g} measured"
    return f"{said}; the next prediction knows it"


def terms_of(out: Path) -> dict[str, float]:
    """Seconds of a worker's step by what they went into: means over all steps but the first few of each worker."""
    sums: dict[str, float] = dict.fromkeys(_TERMS.values(), 0.0)
    steps = 0
    for record in read(out):
        if record["kind"] != "step" or number(record.get("step"), 0.0) <= 3:
            continue
        steps += 1
        for part, term in _TERMS.items():
            sums[term] += number(record.get(f"{part}_s"), 0.0)
    return {term: seconds / steps for term, seconds in sums.items()} if steps else {}


def _amend(out: Path, summary: Mapping[str, Any], chosen: Chosen, run: PredictedRun) -> None:
    """`summary.json` gets what was predicted beside what was measured."""
    low, high = chosen.rates()
    worst = run.wrong_term()
    planned = {
        "way": run.way,
        "predicted_samples_per_second": chosen.samples / run.predicted.step_s,
        "low": low,
        "high": high,
        "measured_samples_per_second": chosen.samples / run.measured_s,
        "is_inside": run.is_inside,
        "predicted_step_s": run.predicted.step_s,
        "predicted_terms_s": run.predicted.terms_s,
        "measured_step_s": run.measured_s,
        "measured_terms_s": run.measured_terms_s,
        "wrong_term": worst[0] if worst and not run.is_inside else None,
    }
    temporary = out / ".summary.json"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode({**summary, "planned": planned})))
    temporary.replace(out / "summary.json")
