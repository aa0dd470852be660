"""Start the workers of this host, pass on what they say, and see the run to its end.

A run that can change goes on without a worker that died, or with another in its place (`survival.py`). In any other,
and when a worker ends by an error of its own, all are ended and the one to blame is named.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from manyhands.cluster.launcher.cores import CoreLayout
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.processes import Worker, WorkerProcesses
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.host_identity import host_identity
from manyhands.cluster.launchers.rank_info import SERVERS

if TYPE_CHECKING:
    from manyhands.cluster.launcher.coordination import Coordination, Elastic
    from manyhands.cluster.launcher.host_agent import HostAgent
    from manyhands.cluster.launcher.survival import Survival

_TICK_S = 0.125
_AFTER_DEATH_S = 1.0
_AFTER_INTERRUPT_S = 3.0
# A worker that lost its peer can be seen to exit before the peer itself: wait this long for the one to blame.
_BLAME_S = 0.5

_LEAVING = Event(
    kind="leaving",
    text="SIGTERM: the workers finish their step, save and leave; a second signal ends them at once",
)


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
    layout: CoreLayout,
    environ: dict[str, str],
    run_dir: Path | None,
    on_tick: Callable[[], None],
    on_line: Callable[[int, str], None],
    on_output: Callable[[int, str], None] | None = None,
    prefix: Callable[[int], list[str]] | None = None,
    load: str | None = None,
    arena: bool | int = True,
    servers: int = 0,
    elastic: "Elastic | None" = None,
    host_agent: "HostAgent | None" = None,
    on_event: Callable[[Event], None] = lambda event: None,
    ask: int = local.ASK,
) -> Outcome:
    """Run `command` (a script or `-m` and a module, with its arguments) in every process until all have ended.

    Servers run the same command as the workers, and their ranks follow those of the workers.

    `on_line` gets what they say on standard error, and on standard output unless `on_output` takes that.
    `environ` comes on top of this process's own variables. `prefix(rank)` is put before the worker's command
    and must replace itself by it, as `nice` and `ip netns exec` do. With `load` and without a prefix, workers are forks
    of one process that has imported that module. `arena` is whether they share memory, or the memory that they share
    with others. With `elastic` the run survives the death of workers, and `on_event` hears what happened; with
    `host_agent` the workers take part in a run whose launcher is on another host. Call this
    from the main thread: signals go there, and the workers die with it. The first SIGTERM asks them to save and leave,
    by the signal `ask`; the second one, and any other, ends them.
    """
    ours = {local.SIZE: str(workers + servers), local.LAUNCHER_PID: str(os.getpid())}
    ours[SERVERS] = str(servers)
    if run_dir is not None:
        ours[local.RUN_DIR] = str(run_dir)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        coordination = stack.enter_context(_coordinate(workers, servers, elastic)) if elastic else None
        if coordination and elastic:
            ours |= coordination.environ
            ours[local.MOST] = str(elastic.most)
        crew = stack.enter_context(
            WorkerProcesses(
                on_line, on_output or on_line, arena=arena, name=lambda rank: _name(rank, workers, servers)
            )
        )
        environs = [
            {**os.environ, **ours, **environ, **_share(layout, rank, workers)}
            for rank in range(workers + servers)
        ]

        if host_agent:
            for rank, known in enumerate(environs):
                known[local.NUMBER] = str(host_agent.first_number + rank)
        on_hosts = host_agent is not None or (elastic is not None and elastic.hosts > 0)
        if on_hosts:
            for known in environs[workers:]:
                known[local.SERVES] = "1"

        def start(place: int, more: dict[str, str], rank: int | None = None) -> int:
            before = prefix(place) if prefix else []
            if host_agent:
                more = more | {local.NUMBER: str(host_agent.first_number + crew.size)}
            command_line = [*before, sys.executable, "-m", "manyhands.cluster.worker", *command]
            return crew.start(command_line, environs[place] | more, rank)

        survival: Survival | HostAgent | None = host_agent
        if host_agent:
            host_agent.see_to(crew, lambda place: start(place, {}))
        if elastic and coordination:
            if elastic.most > workers and run_dir is not None and crew.memory_fd is not None:
                from manyhands.cluster.launcher.invitation import Invite, published

                invite = Invite(
                    invitation=coordination.invitation,
                    command=command,
                    strategy=environ.get(local.STRATEGY),
                    workers=workers,
                    servers=servers,
                    most=elastic.most,
                    launcher=os.getpid(),
                    memory_fd=crew.memory_fd,
                    mark=host_identity(),
                )
                stack.enter_context(published(run_dir, invite))
            from manyhands.cluster.launcher import (
                survival as surviving,  # runs that cannot change do without ZeroMQ
            )

            survival = surviving.Survival(
                crew,
                coordination,
                elastic,
                start=lambda place: start(place, {local.IS_NEW: "1"}),
                start_server=lambda place: (
                    start(place, {local.IS_NEW: "1"}) if on_hosts else start(place, {}, rank=place)
                ),
                servers=range(workers, workers + servers),
                on_event=on_event,
            )
        if load and len(environs) > 1 and prefix is None:
            crew.spawn(command, environs, load=load)
        else:
            for rank in range(len(environs)):
                start(rank, {})
        return _watch(crew, workers, servers, signals, on_tick, survival, on_event, ask)


def _coordinate(workers: int, servers: int, elastic: "Elastic") -> "Coordination":
    from manyhands.cluster.launcher.coordination import (
        Coordination,  # runs that cannot change do without ZeroMQ
    )

    return Coordination(list(range(workers)), elastic, servers)


def _share(layout: CoreLayout, rank: int, workers: int) -> dict[str, str]:
    """The cores and threads of one process."""
    if rank < workers:
        cores, threads = layout.cores[rank], layout.threads
    else:
        cores = layout.server_cores[rank - workers] if layout.server_cores else ()
        threads = layout.server_threads
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**counts, local.CORES: ",".join(map(str, cores))}


def _name(rank: int, workers: int, servers: int) -> str:
    """Workers that have come later count after the servers."""
    return f"server {rank - workers}" if workers <= rank < workers + servers else f"worker {rank}"


def _watch(
    crew: WorkerProcesses,
    workers: int,
    servers: int,
    signals: "_Signals",
    on_tick: Callable[[], None],
    survival: "Survival | HostAgent | None",
    on_event: Callable[[Event], None],
    ask: int,
) -> Outcome:
    deaths: list[Worker] = []  # those that the run does not survive
    survived: list[Worker] = []
    finished = left = saved = False  # whether any worker has ended in this way
    is_leaving = False
    blame_at = tick_at = 0.0
    while crew.busy or (survival and survival.goes_on() and not crew.stopping and not signals.count):
        now = time.monotonic()
        if now >= tick_at:
            on_tick()
            if survival and not crew.stopping and not is_leaving:
                survival.tick()
            tick_at = now + _TICK_S
        if signals.count > 1:
            crew.kill()
        elif signals.number == signal.SIGTERM and not crew.is_hatching:
            if not is_leaving:
                is_leaving = True
                crew.ask_to_leave(ask)
                on_event(_LEAVING)
        elif signals.count == 1:
            crew.stop(_AFTER_INTERRUPT_S)
        exits = crew.wait(tick_at - now)
        if crew.stopping:
            continue
        finished = finished or any(worker.code == 0 for worker in exits)
        if survival and survival.failed:
            crew.stop(_AFTER_DEATH_S)
            continue
        saved = saved or any(worker.code == local.EXIT_SAVED for worker in exits)
        left = left or any(worker.code == local.EXIT_LEFT for worker in exits)
        new = [worker for worker in exits if worker.code not in local.GOOD_ENDS]
        if is_leaving:
            new = [worker for worker in new if _innocence(worker) != 1]  # it had nothing to save
        if survival:
            borne = [one for one in exits if survival.note_end(one)]
            new = [worker for worker in new if worker not in borne]
            survived += [worker for worker in borne if worker.code not in local.GOOD_ENDS]
            if exits and not survival.goes_on() and not deaths and not new:
                crew.stop(_AFTER_DEATH_S)  # servers, and workers that came too late
        if new and not deaths:
            blame_at = time.monotonic() + _BLAME_S
        # Of those that went at the same time, a signal is a cause and an exit code perhaps its consequence.
        deaths += sorted(new, key=lambda worker: worker.code > 0)
        if deaths and (_innocence(_first(deaths)) == 0 or time.monotonic() >= blame_at):
            crew.stop(_AFTER_DEATH_S)
    if survival:
        survival.finish()
        finished = finished or survival.has_finished
        if survival.failed and not deaths:
            return Outcome(ok=False, exit_code=local.EXIT_CRASHED, message=survival.failed)
    if saved and (not deaths or _innocence(_first(deaths)) > 0):
        return Outcome(
            ok=False,
            exit_code=local.EXIT_SAVED,
            message="told to end by SIGTERM: the run is saved, and --resume goes on with it",
        )
    if is_leaving and (finished or left) and not deaths and signals.count == 1:
        return Outcome(ok=True, exit_code=0, message=f"all {workers} workers finished")
    if signals.number is not None and (not deaths or _innocence(_first(deaths)) > 0):
        name = signal.Signals(signals.number).name
        return Outcome(ok=False, exit_code=128 + signals.number, message=f"interrupted by {name}")
    # Where the others only lost someone, or nobody could go on, the one that they had lost last is to blame.
    if (deaths or not finished) and not any(_innocence(one) == 0 for one in deaths):
        deaths = [*reversed(survived), *deaths]
    if deaths:
        return _death(_first(deaths), workers, servers)
    return Outcome(ok=True, exit_code=0, message=f"all {workers} workers finished")


def _innocence(worker: Worker) -> int:
    """0 for one that died by itself, more for one that lost its peer or was told to end."""
    if worker.code == local.EXIT_PEER_LOST:
        return 2
    told = (local.EXIT_TERMINATED, -signal.SIGTERM, -local.ASK, -local.END)
    return 1 if worker.code in told else 0


def _first(deaths: list[Worker]) -> Worker:
    """The death to blame: the first in time among those that are not another's consequence."""
    return min(deaths, key=_innocence)


def _death(worker: Worker, workers: int, servers: int) -> Outcome:
    who = _name(worker.rank, workers, servers) + (f" of {workers}" if worker.rank < workers else "")
    return Outcome(
        ok=False,
        exit_code=worker.code if worker.code > 0 else 128 - worker.code,
        message=f"{who} {worker.ending}",
        rank=worker.rank,
        tail=tuple(worker.tail),
    )


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
