"""Start the workers of this host, pass on what they say, end them all when one dies, and name that one."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from manyhands.cluster.cores import Layout
from manyhands.cluster.crew import Crew, Worker
from manyhands.cluster.launchers import local
from manyhands.cluster.seat import SERVERS

_TICK_S = 0.125
_AFTER_DEATH_S = 1.0
_AFTER_INTERRUPT_S = 3.0
# A worker that lost its peer can be seen to exit before the peer itself: wait this long for the one to blame.
_BLAME_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a world ended."""

    ok: bool
    exit_code: int
    message: str
    rank: int | None = None
    """The process that died first, where one did; servers count after the workers."""
    tail: tuple[str, ...] = ()
    """The last lines of that worker's traceback or standard error."""


def run(
    command: list[str],
    *,
    workers: int,
    layout: Layout,
    environ: dict[str, str],
    run_dir: Path | None,
    on_tick: Callable[[], None],
    on_line: Callable[[int, str], None],
    on_output: Callable[[int, str], None] | None = None,
    prefix: Callable[[int], list[str]] | None = None,
    load: str | None = None,
    arena: bool = True,
    servers: int = 0,
) -> Outcome:
    """Run `command` (a script or `-m` and a module, with its arguments) in every process until all have ended.

    Servers run the same command as the workers, and their ranks follow those of the workers.

    `on_line` gets what they say on standard error, and on standard output unless `on_output` takes that.
    `environ` comes on top of this process's own variables. `prefix(rank)` is put before the worker's command
    and must replace itself by it, as `nice` and `ip netns exec` do. With `load` and without a prefix, workers are forks
    of one process that has imported that module. Call this from the main thread: signals
    go there, and the workers die with it.
    """
    ours = {local.SIZE: str(workers + servers), local.LAUNCHER_PID: str(os.getpid())}
    ours[SERVERS] = str(servers)
    if run_dir is not None:
        ours[local.RUN_DIR] = str(run_dir)
    with (
        _Signals() as signals,
        Crew(on_line, on_output or on_line, arena=arena, name=lambda rank: _name(rank, workers)) as crew,
    ):
        environs = [
            {**os.environ, **environ, **ours, **_share(layout, rank, workers)}
            for rank in range(workers + servers)
        ]
        if load and len(environs) > 1 and prefix is None:
            crew.hatch(command, environs, load=load)
        else:
            for rank, each in enumerate(environs):
                before = prefix(rank) if prefix else []
                crew.start([*before, sys.executable, "-m", "manyhands.cluster.worker", *command], each)
        return _watch(crew, workers, signals, on_tick)


def _share(layout: Layout, rank: int, workers: int) -> dict[str, str]:
    """The cores and threads of one process."""
    if rank < workers:
        cores, threads = layout.cores[rank], layout.threads
    else:
        cores = layout.server_cores[rank - workers] if layout.server_cores else ()
        threads = layout.server_threads
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**counts, local.CORES: ",".join(map(str, cores))}


def _name(rank: int, workers: int) -> str:
    return f"worker {rank}" if rank < workers else f"server {rank - workers}"


def _watch(crew: Crew, workers: int, signals: "_Signals", on_tick: Callable[[], None]) -> Outcome:
    deaths: list[Worker] = []
    blame_at = tick_at = 0.0
    while crew.busy:
        now = time.monotonic()
        if now >= tick_at:
            on_tick()
            tick_at = now + _TICK_S
        if signals.count == 1:
            crew.stop(_AFTER_INTERRUPT_S)
        elif signals.count > 1:
            crew.kill()
        exits = crew.wait(tick_at - now)
        if crew.stopping:
            continue
        new = [worker for worker in exits if worker.code != 0]
        if new and not deaths:
            blame_at = time.monotonic() + _BLAME_S
        # Of those that went at the same time, a signal is a cause and an exit code perhaps its consequence.
        deaths += sorted(new, key=lambda worker: worker.code > 0)
        if deaths and (_innocence(_first(deaths)) == 0 or time.monotonic() >= blame_at):
            crew.stop(_AFTER_DEATH_S)
    if signals.number is not None and (not deaths or _innocence(_first(deaths)) > 0):
        name = signal.Signals(signals.number).name
        return Outcome(ok=False, exit_code=128 + signals.number, message=f"interrupted by {name}")
    if deaths:
        return _death(_first(deaths), workers)
    return Outcome(ok=True, exit_code=0, message=f"all {workers} workers finished")


def _innocence(worker: Worker) -> int:
    """0 for one that died by itself, more for one that lost its peer or was told to end."""
    if worker.code == local.EXIT_PEER_LOST:
        return 2
    return 1 if worker.code in (local.EXIT_TERMINATED, -signal.SIGTERM) else 0


def _first(deaths: list[Worker]) -> Worker:
    """The death to blame: the first in time among those that are not another's consequence."""
    return min(deaths, key=_innocence)


def _death(worker: Worker, workers: int) -> Outcome:
    of = f" of {workers}" if worker.rank < workers else ""
    return Outcome(
        ok=False,
        exit_code=worker.code if worker.code > 0 else 128 - worker.code,
        message=f"{_name(worker.rank, workers)}{of} died: {describe_exit(worker.code)}",
        rank=worker.rank,
        tail=tuple(worker.tail),
    )


def describe_exit(code: int) -> str:
    """An exit code of `subprocess` (negative for a signal) in words."""
    if code == local.EXIT_TERMINATED:
        return "told to end by SIGTERM (exit code 143)"
    if code == local.EXIT_PEER_LOST:
        return "it lost another worker (exit code 70)"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    meaning = {
        "SIGSEGV": "segmentation fault",
        "SIGBUS": "bus error",
        "SIGABRT": "aborted",
        "SIGILL": "illegal instruction",
        "SIGFPE": "arithmetic fault",
    }.get(name)
    return f"{meaning} ({name})" if meaning else f"killed by {name}"


class _Signals:
    """Notes the signals that end a run instead of dying of them; restores the handlers on leaving."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup a closed terminal stays ignored. An ignored SIGINT only means that a script's shell
            # started us in the background: whoever sends it all the same wants us to end.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1
