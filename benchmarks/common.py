"""What every benchmark needs: contenders that take turns, ratios with their spread, tables, records, processes."""

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from manyhands.cluster import supervisor
from manyhands.cluster.cores import Layout

HERE = Path(__file__).resolve().parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
TIMEOUT_S = 900.0

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
    end_on_sigterm()
    return parser


def end_on_sigterm() -> None:
    """Leave through every `finally`, so that no contender outlives its benchmark."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


# Turns and ratios


def interleave(contenders: Mapping[str, Callable[[], T]], rounds: int, label: str) -> dict[str, list[T]]:
    """Every contender once per round, each round beginning with another, so that drift of the machine hits all."""
    names = list(contenders)
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            say(f"{label}: round {number + 1} of {rounds}, {name}")
            results[name].append(contenders[name]())
    return results


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of medians, the lowest and highest ratio of a single round, and what it should be."""

    name: str
    value: float
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
        return [self.name, f"{self.value:.2f}", f"{self.low:.2f}–{self.high:.2f}", target, verdict]

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


RATIO_HEADER = ["ratio", "of medians", "per round", "target", ""]


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
    return Ratio(name=name, value=value, low=min(each), high=max(each), target=target, at_most=at_most)


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


def write(out: Path | None, *, benchmark: str, settings: Mapping[str, Any], results: Any) -> None:
    """All numbers, with what is needed to judge them."""
    if out is None:
        return
    record = {
        "benchmark": benchmark,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": _machine(),
        "settings": settings,
        "results": results,
    }
    out.write_text(json.dumps(record, indent=1) + "\n")
    say(f"written: {out}")


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
        "python": platform.python_version(),
        "versions": versions,
    }


# Processes: each worker of a contender writes RANK.json into a folder of its own run


def run_ours(script: str, options: Sequence[str], layout: Layout) -> list[dict[str, Any]]:
    """Run a script in workers of our own supervisor, and return what they wrote."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "events").mkdir()
        lines: list[str] = []
        outcome = supervisor.run(
            [str(HERE / script), "--folder", name, *options],
            workers=len(layout.cores),
            layout=layout,
            environ={},
            run_dir=folder,
            on_tick=lambda: None,
            on_line=lambda rank, line: lines.append(line),
        )
        if not outcome.ok:
            sys.exit("\n".join([*lines, *outcome.tail, outcome.message]))
        return _written(folder)


def run_each(
    script: str, options: Sequence[str], layout: Layout, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run a script in plain processes, with the ranks as variables and pinned as ours are."""
    with TemporaryDirectory() as name:
        size = len(layout.cores)
        environ = {**environ, "OMP_NUM_THREADS": str(layout.threads), "WORLD_SIZE": str(size)}
        command = [sys.executable, str(HERE / script), "--folder", name, *options]
        with processes(Path(name)) as start:
            for rank, cores in enumerate(layout.cores):
                start(command, {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cores)
        return _written(Path(name))


def run_command(
    command: Sequence[str],
    script: str,
    options: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    watch: Callable[[int], None] | None = None,
    every_s: float = 0.1,
) -> list[dict[str, Any]]:
    """Run a script through someone's launcher; `watch` is given the launcher's pid again and again."""
    with TemporaryDirectory() as name:
        filled = [part.format(folder=name) for part in command]
        with processes(Path(name), watch, every_s) as start:
            start([*filled, str(HERE / script), "--folder", name, *options], environ or {}, ())
        return _written(Path(name))


@contextlib.contextmanager
def processes(
    folder: Path, watch: Callable[[int], None] | None = None, every_s: float = 0.1
) -> Iterator[Callable[[Sequence[str], Mapping[str, str], Sequence[int]], None]]:
    """Gives a function that starts a process; leaving waits for all, and ends all when one fails."""
    children: list[subprocess.Popen[bytes]] = []
    log = folder / "log"

    def start(command: Sequence[str], environ: Mapping[str, str], cores: Sequence[int]) -> None:
        with log.open("ab") as output, _pinned(cores):
            child = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        children.append(child)

    try:
        yield start
        deadline = time.monotonic() + TIMEOUT_S
        while any(child.poll() is None for child in children):
            failed = any(child.returncode for child in children)
            if failed or time.monotonic() > deadline:
                break
            if watch:
                watch(children[0].pid)
            time.sleep(every_s)
        if any(child.returncode != 0 for child in children):
            codes = [child.returncode for child in children]
            tail = log.read_text(errors="replace")[-4000:]
            sys.exit(f"{tail}\n{' '.join(children[0].args)}\nended with exit codes {codes}")  # type: ignore
    finally:
        for child in children:
            _end(child)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a process with all it has started."""
    if child.poll() is None:
        child.terminate()  # launchers end their workers on this
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """What is started inside inherits these cores; none means all."""
    before = os.sched_getaffinity(0)
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)


def _written(folder: Path) -> list[dict[str, Any]]:
    """What the workers wrote, by rank."""
    found = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [json.loads(path.read_text()) for path in found]


def leave_result(folder: Path, rank: int, result: Mapping[str, Any]) -> None:
    """Called in a worker: what the benchmark reads."""
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


def loopback() -> dict[str, str]:
    """Variables by which `torch.distributed` meets on this machine, at a port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
