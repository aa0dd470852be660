"""What every benchmark needs: contenders that take turns, ratios with their spread, tables and records."""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


# The command line


def arguments(description: str, *, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"turns of each contender (default {rounds})"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all raw numbers there")
    parser.add_argument(
        "--quick", action="store_true", help="only show that it runs; the numbers mean nothing"
    )
    # Leave through every `finally`, so that no contender outlives its benchmark.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return parser


def run_section(description: str, benchmark: str, sections: Mapping[str, Any]) -> None:
    """The command line of a benchmark in sections: modules with `add_arguments` and `run`."""
    parser = arguments(description, rounds=3)
    named = parser.add_subparsers(dest="section", required=True, metavar="SECTION")
    for name, section in sections.items():
        summary = (section.__doc__ or "").partition("\n")[0]
        section.add_arguments(named.add_parser(name, help=summary, description=summary))
    options = parser.parse_args()
    results = sections[options.section].run(options)
    write(options, benchmark=f"{benchmark}-{options.section}", results=results)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


# Turns and ratios


def interleave(contenders: Mapping[str, Callable[[], T]], rounds: int, label: str) -> dict[str, list[T]]:
    """Every contender once per round, each round beginning with another, so that drift of the machine hits all."""
    names = list(contenders)
    results: dict[str, list[T]] = {name: [] for name in names}
    began = _processor_time()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            say(f"{label}: round {number + 1} of {rounds}, {name}")
            results[name].append(contenders[name]())
    say(f"{label}: {stolen_since(began):.1%} of the processors' time went to other machines")
    return results


_Time = tuple[int, int]  # of all processors together: what others got, and everything


def _processor_time() -> _Time:
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return numbers[7], sum(numbers[:8])


def stolen_since(began: _Time) -> float:
    """Which part of the time the host of this virtual machine gave to others; workers that wait for each other
    feel every such pause twice."""
    stolen, everything = _processor_time()
    return (stolen - began[0]) / max(1, everything - began[1])


_BEGAN = _processor_time()


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of medians; the median, lowest and highest ratio of a single round; and what the first should be.

    The median of the rounds is the better of the two where a machine's speed drifts by more than contenders differ.
    """

    name: str
    value: float
    middle: float
    low: float
    high: float
    target: float | None = None
    at_most: bool = False

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def cells(self) -> list[str]:
        verdict = {None: "", True: "reached", False: "missed"}[self.reached]
        target = "" if self.target is None else f"{'≤' if self.at_most else '≥'} {self.target:g}"
        rounds = f"{self.middle:.2f}", f"{self.low:.2f}–{self.high:.2f}"
        return [self.name, f"{self.value:.2f}", *rounds, target, verdict]

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


RATIO_HEADER = ["ratio", "of medians", "median round", "per round", "target", ""]


def ratio(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    target: float | None = None,
    *,
    at_most: bool = False,
) -> Ratio:
    """Ours divided by theirs, from one number per round each."""
    each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    value = statistics.median(ours) / statistics.median(theirs)
    return Ratio(
        name=name,
        value=value,
        middle=statistics.median(each),
        low=min(each),
        high=max(each),
        target=target,
        at_most=at_most,
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    shown = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, shown[0], "-" * max(map(len, shown)), *shown[1:], ""])


def write(options: argparse.Namespace, *, benchmark: str, results: Any) -> None:
    """All numbers, with what is needed to judge them."""
    if options.out is None:
        return
    record = {
        "benchmark": benchmark,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": _machine(),
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "results": results,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    say(f"written: {options.out}")


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    versions = {}
    for name in ("manyhands", "torch", "numpy", "mpi4py", "mpich"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "stolen": stolen_since(_BEGAN),
        "python": platform.python_version(),
        "versions": versions,
    }
