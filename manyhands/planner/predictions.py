"""The ledger of predictions: what was predicted of each run that a plan chose, and what it then did.

A prediction learns from those before it: with x_i = log(measured ÷ priced) of n runs of the same job and strategy on
this host, the next price is multiplied by exp(Σ x_i ÷ (n + 2)), which believes one run by a third and ten by five
sixths; what then remains of the x_i widens its interval. x_i is of the price before it was multiplied: of what is left
after it, the factor would never learn more than half.
"""

import fcntl
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from manyhands.foreign.regular import not_through_links, read_small
from manyhands.planner import cache_folder

FILE = "predictions.jsonl"
_PRIOR_RUNS = 2
_LATEST = 20
_LARGEST_BYTES = 1 << 24


class PredictedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Wall seconds of a step, with a 90 % interval."""

    step_s: float
    low_s: float
    high_s: float
    terms_s: dict[str, float] = {}
    """What it consists of: compute, exchange, wait, update."""
    factor: float = 1.0
    """By which earlier runs have multiplied what was priced."""


class PredictedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger."""

    at: float
    """Unix time."""
    host: str
    job: str
    strategy: str
    way: str
    predicted: PredictedStep
    measured_s: float
    measured_terms_s: dict[str, float] = {}

    @property
    def is_inside(self) -> bool:
        return self.predicted.low_s <= self.measured_s <= self.predicted.high_s

    @property
    def log_ratio(self) -> float:
        return math.log(self.measured_s / self.predicted.step_s)

    def wrong_term(self) -> tuple[str, float, float] | None:
        """The term that is furthest off, with what was predicted and measured of it; None where none is known."""
        known = [name for name in self.predicted.terms_s if name in self.measured_terms_s]
        if not known:
            return None
        worst = max(known, key=lambda name: abs(self.measured_terms_s[name] - self.predicted.terms_s[name]))
        return worst, self.predicted.terms_s[worst], self.measured_terms_s[worst]


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger says of the next prediction."""

    factor: float = 1.0
    spread: float = 0.0
    """Of what is left after that, as a factor less 1, for one case in ten on either side."""
    runs: int = 0

    def applied(self, prediction: PredictedStep) -> PredictedStep:
        """A prediction that knows how those before it went."""
        if not self.runs:
            return prediction
        wider = 1 + self.spread
        return PredictedStep(
            step_s=prediction.step_s * self.factor,
            low_s=prediction.low_s * self.factor / wider,
            high_s=prediction.high_s * self.factor * wider,
            terms_s={name: value * self.factor for name, value in prediction.terms_s.items()},
            factor=prediction.factor * self.factor,
        )


def record(run: PredictedRun, out: Path | None) -> None:
    """Add a line to the user's ledger, and to the run's directory."""
    line = msgspec.json.encode(run) + b"\n"
    for path in (cache_folder.folder() / FILE, out / FILE if out else None):
        if path is not None:
            _append(path, line)


def learned(host: str, job: str, strategy: str) -> Learned:
    """From the latest runs of the same job and strategy on the same host."""
    errors = [
        run.log_ratio + math.log(run.predicted.factor)
        for run in runs(cache_folder.folder() / FILE)
        if (run.host, run.job, run.strategy) == (host, job, strategy)
    ][-_LATEST:]
    if not errors:
        return Learned()
    shift = sum(errors) / (len(errors) + _PRIOR_RUNS)
    left = math.sqrt(sum((error - shift) ** 2 for error in errors) / len(errors))
    return Learned(factor=math.exp(shift), spread=math.expm1(1.645 * left), runs=len(errors))


def runs(path: Path) -> list[PredictedRun]:
    """The ledger's lines; what is no such line is left out."""
    try:
        lines = read_small(path, _LARGEST_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            run = msgspec.json.decode(line, type=PredictedRun)
        except (ValueError, RecursionError):
            continue
        if all(0 < each < math.inf for each in (run.measured_s, run.predicted.step_s, run.predicted.factor)):
            found.append(run)
    return found


def compared(
    predicted: PredictedStep, way: str, known_by: Mapping[str, str], measured: Mapping[str, float]
) -> PredictedRun:
    """A prediction beside the mean step of the run, whose terms are the other figures of `measured`."""
    return PredictedRun(
        at=time.time(),
        host=known_by["host"],
        job=known_by["job"],
        strategy=known_by["strategy"],
        way=way,
        predicted=predicted,
        measured_s=measured["step"],
        measured_terms_s={name: value for name, value in measured.items() if name != "step"},
    )


def _append(path: Path, line: bytes) -> None:
    """As one write, while no other run writes."""
    with open(path, "ab", buffering=0, opener=not_through_links) as file:
        os.fchmod(file.fileno(), 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line)
