"""What `train` and `launch` have in common: a run directory, workers, a live display, one clear end."""

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from manyhands import strategies
from manyhands.cli.display import Display
from manyhands.cli.restart import Restart
from manyhands.cluster.coordinator.control import NUMBERS
from manyhands.cluster.launcher import coordination, cores, supervisor
from manyhands.cluster.launcher import invitation as invites
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.coordination import Elastic
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.addresses import address_towards, meeting_address, parse_hosts
from manyhands.cluster.launchers.rank_info import SERVERS, RankInfo
from manyhands.comm.transports.counters import refuse_several
from manyhands.errors import ManyhandsError, UsageError
from manyhands.placement import Mesh
from manyhands.telemetry import lines

REPLACE = 3
_ENDING_S = 5.0  # for a worker from outside, to end when the run has
STALL_S = "MANYHANDS_STALL_S"
"""After how many seconds of silence a worker is taken for dead."""


@contextmanager
def new_run(out: Path | None, name: str) -> Iterator[Path]:
    """The run's directory: the one asked for, or a new one under `runs/`.

    If it was made here and nothing has been written to it (nothing was trained), it is removed again.
    """
    place = out or _unused(name)
    is_new = not place.exists()
    run = make_directory(place)
    try:
        yield run
    finally:
        if is_new:
            with suppress(OSError):  # not empty
                (run / "events").rmdir()
                run.rmdir()
                if out is None:
                    run.parent.rmdir()


def make_directory(place: Path) -> Path:
    """A directory that can take a run's records."""
    try:
        (place / "events").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the run directory {place} ({error.strerror}); choose another with --out"
        ) from None
    return place.resolve()


def _unused(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stamp}-{re.sub('[^A-Za-z0-9.]+', '-', name).strip('-')}"
    place, number = base, 1
    while place.exists():
        number += 1
        place = base.with_name(f"{base.name}-{number}")
    return place


def forget_records(run: Path) -> None:
    """Remove what an earlier run without a checkpoint has recorded here: it would mix with the new run's."""
    for path in (run / "summary.json", *(run / "events").glob("*.jsonl")):
        path.unlink(missing_ok=True)


def check_workers(asked: int | None, rank_info: RankInfo) -> None:
    """Refuse a number of workers that is not that of the world which another launcher started."""
    if asked not in (None, rank_info.workers):
        raise UsageError(
            f"--workers {asked} but {rank_info.launcher} started {rank_info.workers}; "
            f"leave --workers out, or start {asked} with {rank_info.launcher}"
        )


def refuse_hosts(hosts: str | None, rank_info: RankInfo) -> None:
    """Other launchers bring the hosts themselves."""
    if hosts is not None:
        raise UsageError(
            f"--hosts is for runs of our own launcher, and {rank_info.launcher} has started this one"
        )


def with_servers(rank_info: RankInfo, asked: int | None) -> RankInfo:
    """The rank info in a world of another launcher, of whose ranks the last `asked` are servers."""
    if asked is None or rank_info.launcher == "alone":
        return rank_info
    os.environ[SERVERS] = str(asked)  # `own_rank_info` reads it later
    return replace(rank_info, servers=asked)


def elastic_terms(
    strategy: strategies.Strategy,
    mesh: Mesh,
    most: int,
    replace: int | None,
    hosts: str | None = None,
) -> Elastic | None:
    """How the run may change while it goes on; None if it has to end when a worker dies.

    Replicas in parts go on without one of them as long as another is whole.
    """
    workers, traits = mesh.workers, strategy.traits
    if mesh.members > 1 and (most > workers or hosts is not None):
        raise UsageError(
            f"{workers} workers have parts of replicas, and others cannot join them; use --workers {workers}"
            + (" without --hosts, or torchrun, mpirun or Slurm" if hosts else "")
        )
    stall_s = float(os.environ.get(STALL_S, coordination.STALL_S))
    strategies.admit_copies(strategy, have_hosts=hosts is not None)
    if hosts is not None:
        is_fit = traits.servers.elastic if traits.servers is not None else traits.lockstep
        if not is_fit:
            raise UsageError(
                "--hosts is for strategies whose workers take every step together, and for servers without `cache` and "
                f"`every`, and {strategies.describe(strategy)} is not one of them; use torchrun, mpirun or Slurm for it"
            )
        number, place = parse_hosts(hosts)
        return Elastic(
            most=most if most > workers else NUMBERS,
            replace=REPLACE if replace is None else replace,
            stall_s=stall_s,
            hosts=number,
            address=meeting_address(place),
        )
    is_alone = mesh.replicas == 1 or traits.servers is not None if mesh.members > 1 else most == 1
    if is_alone:
        return None  # servers of parts do not know how to do without a worker
    return Elastic(
        most=most,
        replace=REPLACE if replace is None else replace,
        stall_s=stall_s,
        group_size=mesh.members,
        replicas_equal=traits.synchronous,
    )


def again_terms(mesh: Mesh, command: list[str], resume: list[str], replace: int | None) -> Restart | None:
    """How a run whose replicas are in parts goes on after a death; `resume` makes the command go on where it was."""
    if mesh.members == 1:
        return None
    return Restart(command=command, resume=resume, times=REPLACE if replace is None else replace)


def worker_range(text: str) -> tuple[int, int]:
    """`4`, or `2:6` for 2 workers to which others may come until there are 6."""
    first, colon, last = text.partition(":")
    try:
        least = int(first)
        most = int(last) if colon else least
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a range like 2:6") from None
    if colon and most < least:
        raise argparse.ArgumentTypeError(f"{text!r}: the second number must not be below the first")
    return least, most


def join_run(address: str, command: list[str], workers: int = 1, servers: int = 0) -> int:
    """Be one more worker, or some, of a run on this host or another, until it ends."""
    invite = invites.read(address)
    if not invite.is_here or invite.takes_hosts:
        return _join_from_another_host(invite, address, command or invite.command, workers, servers)
    if servers:
        raise UsageError(
            f"--servers {servers}: the servers of a run on one host are those that it began with; leave --servers out"
        )
    if workers != 1:
        raise UsageError(
            f"--workers {workers}: on the host of the run, workers join one by one; leave --workers out"
        )
    memory_fd = invite.open_memory()
    run = Path(address).resolve()
    seen_s = time.monotonic()

    def end_with_the_run() -> None:
        nonlocal seen_s
        if not invite.is_over():
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > _ENDING_S:
            raise ManyhandsError(f"the run in {address} has ended without this worker")

    environ = {
        local.INVITATION: invite.invitation.text(),
        local.IS_NEW: "1",
        local.NUMBER: str(os.getpid()),
        local.SIZE: str(invite.workers + invite.servers),
        local.MOST: str(invite.most),
        SERVERS: str(invite.servers),
        **({local.STRATEGY: invite.strategy} if invite.strategy else {}),
    }
    try:
        outcome = supervisor.run(
            LaunchPlan(
                command=command or invite.command,
                workers=1,
                layout=cores.layout(1),
                environ=environ,
                run_dir=run,
            ),
            arena=memory_fd,
            on_tick=end_with_the_run,
            on_line=lambda rank, line: print(line, file=sys.stderr, flush=True),
            ask=signal.SIGUSR1,  # this worker alone: the run goes on without it
        )
    finally:
        os.close(memory_fd)
    return _end(outcome)


def _join_from_another_host(
    invite: invites.Invite, directory: str, command: list[str], workers: int, servers: int
) -> int:
    """Start processes of this host in a run of another host's launcher (on one host they do as if on another)."""
    place = invite.invitation.endpoint.partition("://")[2]
    if not invite.takes_hosts:
        raise UsageError(
            f"the run in {directory} is on another host and has room on its own alone; start it with --hosts 2"
        )
    from manyhands.cluster.launcher.host_agent import HostAgent

    if workers < 1:
        raise UsageError(f"workers={workers}: it must be at least 1")
    if servers:
        strategy = strategies.parse(invite.strategy or strategies.DEFAULT)
        strategies.admit(strategy, strategies.Asked(workers=workers, servers=servers))
    own = address_towards(place.rpartition(":")[0])
    make_directory(Path(directory))
    with HostAgent(
        invite.invitation, address=own, workers=workers, servers=servers, replace=REPLACE
    ) as host_agent:

        def on_line(rank: int, line: str) -> None:
            name = "server" if host_agent.is_server(rank) else "worker"
            print(f"[{name} {host_agent.first_number + rank}] {line}", file=sys.stderr, flush=True)

        outcome = supervisor.run(
            LaunchPlan(
                command=command,
                workers=workers,
                servers=servers,
                layout=cores.layout(workers, None, servers),
                environ={
                    local.INVITATION: invite.invitation.text(),
                    **coordination.host_environ(host_agent.host, own),
                    **({local.STRATEGY: invite.strategy} if invite.strategy else {}),
                },
                run_dir=Path(directory).resolve(),
                load="manyhands.engine.session",
            ),
            on_tick=lambda: None,
            on_line=on_line,
            host_agent=host_agent,
            ask=signal.SIGUSR1,  # the workers of this host: the run goes on without them
        )
    return _end(outcome)


def run_workers(
    command: list[str],
    *,
    run: Path,
    workers: int,
    threads: int | None,
    environ: Mapping[str, str],
    pass_output: bool = False,
    servers: int = 0,
    elastic: Elastic | None = None,
    again: Restart | None = None,
) -> int:
    """Start the workers, show their progress until they end, and return the exit code.

    With `pass_output`, what they print goes to our standard output where that is a file or a pipe; on a terminal
    everything is shown above the progress bar. With `again`, a run that cannot change begins again after a death.
    """
    refuse_several(elastic.most if elastic and not elastic.hosts else workers)
    layout = cores.layout(workers, threads, servers)
    print(cores.text(layout), file=sys.stderr)
    with Display(run, workers) as display:
        shown = _Shown(display, run, workers, servers, has_hosts=elastic is not None and elastic.hosts > 0)

        def attempt(command: list[str]) -> Outcome:
            return supervisor.run(
                LaunchPlan(
                    command=command,
                    workers=workers,
                    layout=layout,
                    environ=dict(environ),
                    run_dir=run,
                    load="manyhands.engine.session",  # what every worker imports, PyTorch above all
                    servers=servers,
                ),
                on_tick=display.refresh,
                on_line=shown.line,
                on_output=shown.output if pass_output and not sys.stdout.isatty() else None,
                elastic=elastic,
                on_event=shown.event,
            )

        outcome = again.run(attempt, run, shown.event) if again else attempt(command)
        display.refresh()
    return _end(outcome)


class _Shown:
    """Shows a person what the processes of a run print and what happens to them; keeps the events with the run."""

    def __init__(self, display: Display, run: Path, workers: int, servers: int, *, has_hosts: bool) -> None:
        self._display = display
        self._records = run / "events" / "launcher.jsonl"
        self._workers = workers
        self._servers = servers
        self._has_hosts = has_hosts

    def line(self, rank: int, line: str) -> None:
        self._display.print_line(self._signed(rank, line))

    def output(self, rank: int, line: str) -> None:
        print(self._signed(rank, line), flush=True)

    def event(self, event: Event) -> None:
        self._display.print_line(event.text)
        with suppress(OSError), self._records.open("ab") as file:
            file.write(lines.encode({"kind": event.kind, "t": time.time(), "rank": -1, **event.fields}))

    def _signed(self, rank: int, line: str) -> str:
        if self._workers <= rank < self._workers + self._servers:
            name = rank if self._has_hosts else rank - self._workers
            return f"[server {name}] {line}"
        return f"[worker {rank}] {line}" if self._workers > 1 else line


def _end(outcome: Outcome) -> int:
    """Say how it ended, if it did not end well."""
    if outcome.exit_code == local.EXIT_SAVED:
        print(outcome.message, file=sys.stderr)
    elif not outcome.ok:
        refusal = [line for line in outcome.tail if line.startswith("error: ")]
        if outcome.exit_code == 2 and refusal:
            print(refusal[-1], file=sys.stderr)
        else:
            for line in outcome.tail:
                print(line, file=sys.stderr)
            print(f"error: {outcome.message}", file=sys.stderr)
    return outcome.exit_code
