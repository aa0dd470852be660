"""What one launcher starts on its host: commands, environment and cores of each worker and server."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhands.cluster.launcher import empty_terminal
from manyhands.cluster.launcher.cores import CoreLayout
from manyhands.cluster.launcher.processes import WorkerProcesses
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.rank_info import SERVERS


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The same command in `workers` workers and `servers` servers, whose ranks follow those of the workers."""

    command: list[str]
    """A script, or `-m` and a module, with its arguments."""
    workers: int
    servers: int = 0
    layout: CoreLayout
    environ: Mapping[str, str]
    run_dir: Path | None
    prefix: Callable[[int], list[str]] | None = None
    """Stands before a worker's command and must replace itself by it, as `nice` does."""
    load: str | None = None
    """Without a prefix, a fork server imports this module and forks the workers."""
    debug: int | None = None
    """The worker that gets the launcher's terminal."""

    @property
    def size(self) -> int:
        return self.workers + self.servers

    def name(self, rank: int) -> str:
        """What people call a process; workers that came later count after the servers."""
        is_server = self.workers <= rank < self.size
        return f"server {rank - self.workers}" if is_server else f"worker {rank}"

    def environs(self, told: Mapping[str, str]) -> list[dict[str, str]]:
        """The environment of every process, `told` it besides what every run tells."""
        ours = {local.SIZE: str(self.size), local.LAUNCHER_PID: str(os.getpid()), SERVERS: str(self.servers)}
        if size := empty_terminal.size():  # what a worker prints comes to this terminal in the end
            ours |= {name: str(n) for name, n in zip(("LINES", "COLUMNS"), size, strict=True)}
        if self.run_dir is not None:
            ours[local.RUN_DIR] = str(self.run_dir)
        return [
            {**os.environ, **ours, **told, **self.environ, **self._share(rank)} for rank in range(self.size)
        ]

    def _share(self, rank: int) -> dict[str, str]:
        """The cores and threads of one process."""
        layout = self.layout
        if rank < self.workers:
            cores, threads = layout.cores[rank], layout.threads
        else:
            cores = layout.server_cores[rank - self.workers] if layout.server_cores else ()
            threads = layout.server_threads
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        return {**counts, local.CORES: ",".join(map(str, cores))}


class Starter:
    """Starts the processes of a plan, and others in the place of those that died.

    `is_spread` says that the run may have several hosts; `first_number` is the number of this host's first process in a
    run whose coordinator is on another host.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        processes: WorkerProcesses,
        told: Mapping[str, str],
        *,
        is_spread: bool,
        first_number: int | None,
    ) -> None:
        self._plan = plan
        self._processes = processes
        self._is_spread = is_spread
        self._first_number = first_number
        self._environs = plan.environs(told)
        for rank, environ in enumerate(self._environs):
            environ |= self._number(rank)
            if is_spread and rank >= plan.workers:
                environ[local.SERVES] = "1"

    def start_all(self) -> None:
        plan = self._plan
        if plan.load and plan.size > 1 and plan.prefix is None and plan.debug is None:
            self._processes.fork(plan.command, self._environs, load=plan.load)
        else:
            for rank in range(plan.size):
                self.start(rank)

    def start_new(self, place: int) -> int:
        """Start a worker that joins a run under way, in the place of another; returns its number."""
        return self.start(place, {local.IS_NEW: "1"})

    def start_server(self, place: int) -> int:
        """Start a server that takes over from one that died; returns its number."""
        return self.start_new(place) if self._is_spread else self.start(place, rank=place)

    def start(self, place: int, more: Mapping[str, str] | None = None, rank: int | None = None) -> int:
        plan, processes = self._plan, self._processes
        before = plan.prefix(place) if plan.prefix else []
        environ = {**self._environs[place], **(more or {}), **self._number(processes.size)}
        command = [*before, sys.executable, "-m", "manyhands.cluster.worker", *plan.command]
        return processes.start(command, environ, rank, has_terminal=processes.size == plan.debug)

    def _number(self, rank: int) -> dict[str, str]:
        return {} if self._first_number is None else {local.NUMBER: str(self._first_number + rank)}
