"""The summary of a benchmark: small enough to commit, and all that docs/benchmarks.md and README's table are made from.

One file per benchmark (and job), `benchmarks/results/NAME.json`, at most 60 lines: one line for every measured
quantity and one for every ratio. `benchmarks/report.py` reads it.
"""

import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
RAW = FOLDER / "raw"  # git ignores it
MOST_LINES = 60
NOT_RECORDED = "not recorded"
# What says where the numbers go, and nothing about how they were made.
_NOT_SETTINGS = ("out", "summaries", "label", "quick")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ours divided by theirs in each round: the median of the rounds, the lowest and the highest, and a target."""

    of: str = ""
    """What was measured, where a benchmark has several: a model, a size."""
    name: str
    median: float
    low: float
    high: float
    rounds: tuple[float, ...]
    target: float | None = None
    at_most: bool = False

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.median <= self.target if self.at_most else self.median >= self.target

    def cells(self) -> list[str]:
        verdict = {None: "", True: "reached", False: "missed"}[self.reached]
        target = "" if self.target is None else f"{'≤' if self.at_most else '≥'} {self.target:g}"
        name = f"{self.of}: {self.name}" if self.of else self.name
        return [name, f"{self.median:.2f}", f"{self.low:.2f}–{self.high:.2f}", target, verdict]

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


RATIO_HEADER = ["ratio", "median round", "per round", "target", ""]


def ratio(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    target: float | None = None,
    *,
    at_most: bool = False,
    of: str = "",
) -> Ratio:
    """Ours divided by theirs, from one number per round each.

    A machine whose speed drifts moves both numbers of a round alike, so the rounds' ratios say more than a ratio of two
    medians, which may come from different minutes.
    """
    each = tuple(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Ratio(
        of=of,
        name=name,
        median=statistics.median(each),
        low=min(each),
        high=max(each),
        rounds=each,
        target=target,
        at_most=at_most,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One quantity of every contender: one number per round each."""

    of: str
    unit: str
    values: Mapping[str, Sequence[float]]

    def record(self) -> dict[str, Any]:
        spread = {
            name: [statistics.median(each), min(each), max(each), len(each)]
            for name, each in self.values.items()
            if each
        }
        return {"of": self.of, "unit": self.unit, "median, lowest, highest, rounds": spread}


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a benchmark has found out, as it goes into a summary."""

    title: str
    measured: list[Measured] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: list[Mapping[str, str]] = field(default_factory=list)
    """Rows of a table of words, all with the same columns."""


def summary(name: str, findings: Findings, *, time: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that is needed to judge the numbers and to repeat them."""
    return {
        "benchmark": name,
        "title": findings.title,
        "command": _command(),
        "commit": _commit(),
        "time": time,
        "machine": machine(),
        "settings": {key: value for key, value in settings.items() if key not in _NOT_SETTINGS},
        "notes": findings.notes,
        "counts": findings.counts,
        "texts": [dict(row) for row in findings.texts],
        "measured": [line.record() for line in findings.measured],
        "ratios": [_short(line) for line in findings.ratios],
    }


def _short(line: Ratio) -> dict[str, Any]:
    record = {
        "of": line.of,
        "ratio": line.name,
        "median": line.median,
        "low": line.low,
        "high": line.high,
        "rounds": list(line.rounds),
    }
    if line.target is None:
        return record
    return {**record, "target": f"{'≤' if line.at_most else '≥'} {line.target:g}", "reached": line.reached}


def encode(record: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of a list, so that a person can read it and git can compare it."""

    def text(value: Any) -> str:
        return json.dumps(_rounded(value), ensure_ascii=False)

    parts = []
    for key, value in record.items():
        if value in ([], {}):
            continue
        if isinstance(value, list):
            lines = ",\n".join(f"  {text(entry)}" for entry in value)
            parts.append(f' "{key}": [\n{lines}\n ]')
        else:
            parts.append(f' "{key}": {text(value)}')
    encoded = "{\n" + ",\n".join(parts) + "\n}\n"
    lines_used = encoded.count("\n")
    if lines_used > MOST_LINES:
        raise ValueError(
            f"the summary {record['benchmark']} has {lines_used} lines; {MOST_LINES} are allowed"
        )
    return encoded


def _rounded(value: Any) -> Any:
    """Four digits: no measurement here is better than that."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value


def _command() -> str:
    """As it was typed, without where the numbers go and how the summary is called."""
    words, skip = [], False
    for word in sys.argv[1:]:
        option = word.partition("=")[0]
        if skip or option in ("--out", "--summaries", "--label", "--sources"):
            skip = not skip and option == word
            continue
        words.append(word)
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def _commit() -> dict[str, str]:
    def git(*words: str) -> str:
        command = ["git", "-C", str(FOLDER), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        # A run of several jobs writes the summaries of the first ones before it measures the others.
        changes = git("status", "--porcelain", "-uno", "--", ":/", ":(exclude)results")
    except (OSError, subprocess.CalledProcessError):
        return {"hash": NOT_RECORDED, "is": "there was no git repository"}
    return {"hash": commit, "is": "measured, with uncommitted changes" if changes else "measured"}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    versions = {}
    for name in ("torch", "numpy", "mpi4py", "mpich"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory_bytes / 1e9:.1f} GB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
        "load": os.getloadavg()[0],
        "stolen": stolen_since(_BEGAN),
    }


_Time = tuple[int, int]  # of all processors together: what others got, and everything


def processor_time() -> _Time:
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return numbers[7], sum(numbers[:8])


def stolen_since(began: _Time) -> float:
    """Which part of the time the host of this virtual machine gave to others; workers that wait for each other
    feel every such pause twice."""
    stolen, everything = processor_time()
    return (stolen - began[0]) / max(1, everything - began[1])


_BEGAN = processor_time()
