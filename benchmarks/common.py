"""What every benchmark needs: contenders that take turns, tables and records."""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from summaries import (
    RATIO_HEADER,
    RAW,
    RESULTS,
    Findings,
    encode,
    machine,
    processor_time,
    stolen_since,
    summary,
)

T = TypeVar("T")


# The command line


def arguments(description: str, *, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"turns of each contender (default {rounds})"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="all raw numbers (default benchmarks/raw)"
    )
    parser.add_argument(
        "--summaries", type=Path, metavar="FOLDER", help="what is committed (default benchmarks/results)"
    )
    parser.add_argument("--label", help="added to the summaries' names, for a run with other settings")
    parser.add_argument(
        "--quick", action="store_true", help="only show that it runs; the numbers mean nothing"
    )
    # Leave through every `finally`, so that no contender outlives its benchmark.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return parser


def run_section(description: str, benchmark: str, sections: Mapping[str, Any]) -> None:
    """The command line of a benchmark in sections: modules with `add_arguments` and `run`,
    which returns the raw numbers and what it found out, by job."""
    parser = arguments(description, rounds=3)
    named = parser.add_subparsers(dest="section", required=True, metavar="SECTION")
    for name, section in sections.items():
        about = (section.__doc__ or "").partition("\n")[0]
        section.add_arguments(named.add_parser(name, help=about, description=about))
    options = parser.parse_args()
    results, findings = sections[options.section].run(options)
    name = f"{benchmark}-{options.section}"
    summaries = {f"{name}-{job}" if job else name: found for job, found in findings.items()}
    write(options, benchmark=name, results=results, summaries=summaries)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


# Turns


def interleave(contenders: Mapping[str, Callable[[], T]], rounds: int, label: str) -> dict[str, list[T]]:
    """Every contender once per round, each round beginning with another, so that drift of the machine hits all."""
    names = list(contenders)
    results: dict[str, list[T]] = {name: [] for name in names}
    began = processor_time()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            say(f"{label}: round {number + 1} of {rounds}, {name}")
            results[name].append(contenders[name]())
    say(f"{label}: {stolen_since(began):.1%} of the processors' time went to other machines")
    return results


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


def show(found: Findings) -> None:
    """What was found out, as tables: medians with their range, and ratios."""
    for unit in dict.fromkeys(line.unit for line in found.measured):
        rows = [
            [name if line.of == found.title else f"{line.of}: {name}", *_spread(each), str(len(each))]
            for line in found.measured
            if line.unit == unit
            for name, each in line.values.items()
            if each
        ]
        print(table(found.title, [unit, "median", "per round", "rounds"], rows))
    if found.ratios:
        print(table("", RATIO_HEADER, [line.cells() for line in found.ratios]), flush=True)


def _spread(each: Sequence[float]) -> list[str]:
    return [f"{statistics.median(each):.4g}", f"{min(each):.4g}–{max(each):.4g}"]


def write(
    options: argparse.Namespace, *, benchmark: str, results: Any, summaries: Mapping[str, Findings]
) -> None:
    """All numbers, which are not committed, and a summary of each job, which is.

    A quick run shows only that the benchmark runs, so it writes only what it is told to.
    """
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "summaries")}
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    out, folder = options.out, options.summaries
    if not options.quick:
        out, folder = out or RAW / f"{benchmark}.json", folder or RESULTS
    if out:
        raw = {
            "benchmark": benchmark,
            "time": now,
            "machine": machine(),
            "settings": settings,
            "results": results,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(raw, indent=1) + "\n")
        say(f"written: {out}")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for name, findings in summaries.items():
            called = f"{name}-{options.label}" if options.label else name
            record = summary(called, findings, time=now, settings=settings)
            (folder / f"{called}.json").write_text(encode(record))
            say(f"written: {folder / called}.json")
