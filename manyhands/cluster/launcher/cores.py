"""Which cores each worker of this host computes on."""

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path

from manyhands.errors import UsageError

MOST_THREADS = 1024  # per worker: OpenMP ends the process for want of memory where there are far more


@dataclass(frozen=True, kw_only=True)
class CoreLayout:
    """Workers × threads of one host."""

    cores: tuple[tuple[int, ...], ...]
    """The cores of each worker; empty where a worker is not pinned."""
    threads: int
    """Threads per worker."""
    unpinned_because: str | None = None
    server_cores: tuple[tuple[int, ...], ...] = ()
    """The cores of each server, as for the workers."""
    server_threads: int = 1


def layout(workers: int, threads: int | None = None, servers: int = 0) -> CoreLayout:
    """Divide the cores that this process may use among the workers and servers."""
    return divide(workers, threads, sorted(os.sched_getaffinity(0)), quota_cores(), servers)


def divide(
    workers: int, threads: int | None, cores: list[int], quota: float | None, servers: int = 0
) -> CoreLayout:
    """Disjoint cores for every process where they suffice, else a word on why not.

    Each server gets a core before the workers divide the rest, and what does not divide evenly.
    """
    if workers < 1:
        raise UsageError(f"{workers} workers cannot train; use at least 1.")
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads per worker cannot compute; use at least 1.")
    if threads is not None and threads > MOST_THREADS:
        raise UsageError(
            f"{threads} threads per worker on {len(cores)} cores; use at most {MOST_THREADS}, or leave --threads out"
        )
    limited = quota is not None and quota < len(cores)
    usable = max(1, math.floor(quota)) if quota is not None and limited else len(cores)
    threads = threads or max(1, (usable - servers) // workers)
    server_threads = max(1, (usable - workers * threads) // servers) if servers else 1
    total = workers * threads + servers * server_threads
    why = None
    if limited:
        # Every container of the host sees the same core numbers: pinning would pile them onto the first few.
        why = f"a control group allows {quota:g} of {len(cores)} cores"
    elif total > usable:
        why = f"{total} threads share {usable} core{_s(usable)}"
    sizes = [threads] * workers + [server_threads] * servers
    edges = list(itertools.accumulate(sizes, initial=0))
    shares = tuple(() if why else tuple(cores[a:b]) for a, b in itertools.pairwise(edges))
    return CoreLayout(
        cores=shares[:workers],
        threads=threads,
        unpinned_because=why,
        server_cores=shares[workers:],
        server_threads=server_threads,
    )


def text(layout: CoreLayout) -> str:
    """One line for people: `2 workers × 1 thread, pinned to cores 0 | 1`."""
    workers, threads = len(layout.cores), layout.threads
    split = f"{workers} worker{_s(workers)} × {threads} thread{_s(threads)}"
    if servers := len(layout.server_cores):
        split += f" and {servers} server{_s(servers)} × {layout.server_threads}"
    if layout.unpinned_because:
        return f"{split}, not pinned ({layout.unpinned_because})"
    shares = (*layout.cores, *layout.server_cores)
    cores = " | ".join(_ranges(share) for share in shares)
    return f"{split}, pinned to core{_s(sum(map(len, shares)))} {cores}"


def quota_cores(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """How many cores' worth of time the control groups allow, or None if they do not limit it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / "cpu"
        else:
            continue
        # A limit anywhere above holds as well. Inside a container the path may be the host's and lead nowhere
        # here; the container's own limit is then found at the root.
        folder = base / group.lstrip("/")
        limits += [_limit(place) for place in (folder, *folder.parents) if place.is_relative_to(base)]
    smallest = min(limits, default=math.inf)
    return None if math.isinf(smallest) else smallest


def _limit(folder: Path) -> float:
    """Quota ÷ period of one control group, of version 2 or 1; infinite where there is none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except OSError:
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _ranges(cores: tuple[int, ...]) -> str:
    """`0-2,5` for (0, 1, 2, 5)."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
