"""What all runs of our own launcher have in common: a run directory, workers, a live display, one clear end."""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from manyhands import strategies
from manyhands.cluster.coordinator.control import NUMBERS
from manyhands.cluster.launcher import coordination, cores, first_host, room, supervisor
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.coordination import Elastic
from manyhands.cluster.launcher.cores import CoreLayout
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.cluster.launcher.worker_logs import FOLDER
from manyhands.cluster.launchers import open_between_hosts
from manyhands.cluster.launchers.addresses import meeting_address, parse_hosts
from manyhands.cluster.launchers.rank_info import SERVERS, RankInfo
from manyhands.comm.transports.counters import refuse_several
from manyhands.errors import ManyhandsError, UsageError
from manyhands.foreign.regular import read_small
from manyhands.launching.display import Display
from manyhands.launching.restart import Restart
from manyhands.launching.shown import Shown
from manyhands.launching.words import say
from manyhands.placement import Mesh

AUTO = "auto"
REPLACE = 3
LONGEST_NAME = 100
"""Of a run's directory that is named after the run; file systems take no more than 255."""
STALL_S = "MANYHANDS_STALL_S"
"""After how many seconds of silence, or without a step, the launcher looks at a worker more closely."""
WAIT_S = "MANYHANDS_WAIT_S"
"""For how many seconds a host that has joined waits for the first host of its run, when nothing is heard of it."""


@contextmanager
def new_run(out: Path | None, name: str, *, keeps_logs: bool = False) -> Iterator[Path]:
    """The run's directory: the one asked for, or a new one under `runs/`.

    If it was made here and nothing has been written to it (nothing was trained), it is removed again; and so are the
    logs, which the terminal has shown, unless `out` is given or it `keeps_logs`.
    """
    place = out or _unused(name)
    is_new = not os.path.lexists(place)
    run = make_directory(place)
    try:
        yield run
    finally:
        if is_new:
            with suppress(OSError):  # not empty
                (run / "events").rmdir()
                if out is None and not keeps_logs:
                    shutil.rmtree(run / FOLDER, ignore_errors=True)
                run.rmdir()
                if out is None:
                    run.parent.rmdir()


def make_directory(place: Path) -> Path:
    """A directory that can take a run's records; one that is made here is for this user alone."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_another_users(place)
        (place / "events").mkdir(exist_ok=True)
        run = place.resolve()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"cannot make the run directory {place} ({reason}); choose another with --out"
        ) from None
    for folder in ("events", FOLDER):
        if (run / folder).is_symlink():
            raise UsageError(
                f"{run / folder} is a link to another place, and files of a run are removed and written there; "
                "remove the link, or choose another directory with --out"
            )
    return run


def read_summary(run: Path) -> dict[str, Any] | None:
    """What a run of ours has left; None where there is none."""
    path = run / "summary.json"
    try:
        found = json.loads(read_small(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ManyhandsError(
            f"{path} cannot be read ({reason}); the records of the run are in events/"
        ) from None
    if not isinstance(found, dict):
        raise ManyhandsError(
            f"{path} cannot be read (it is no summary); the records of the run are in events/"
        )
    return found


def _refuse_another_users(place: Path) -> None:
    """Its owner could put links and checkpoints there. Root may use it: in a container it may be a person's own."""
    owner, own = place.stat().st_uid, os.geteuid()
    if own != 0 and owner not in (0, own):
        raise UsageError(
            f"the run directory {place} belongs to another user (number {owner}); choose another with --out"
        )


def _unused(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    plain = re.sub("[^A-Za-z0-9.]+", "-", name).strip("-")
    base = Path("runs") / f"{stamp}-{plain[:LONGEST_NAME]}"
    place, number = base, 1
    while place.exists():
        number += 1
        place = base.with_name(f"{base.name}-{number}")
    return place


def forget_records(run: Path) -> None:
    """Remove what an earlier run without a checkpoint has recorded here: it would mix with the new run's."""
    records = (path for kind in ("*.jsonl", "*.thinned") for path in (run / "events").glob(kind))
    for path in (run / "summary.json", *records, *(run / FOLDER).glob("*.log")):
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

    Replicas in parts go on without one of them as long as another is whole, or as the host's memory has what dead
    workers had of it.
    """
    workers, traits = mesh.workers, strategy.traits
    if mesh.members > 1 and (most > workers or hosts is not None):
        raise UsageError(
            f"{workers} workers have parts of replicas, and others cannot join them; use --workers {workers}"
            + (" without --hosts, or torchrun, mpirun or Slurm" if hosts else "")
        )
    strategies.admit_copies(strategy, have_hosts=hosts is not None)
    if hosts is not None:
        admit_hosts(strategy)
        number, place = parse_hosts(hosts)
        return Elastic(
            most=most if most > workers else NUMBERS,
            replace=REPLACE if replace is None else replace,
            stall_s=stall_s(),
            hosts=number,
            address=meeting_address(place),
        )
    replace = REPLACE if replace is None else replace
    parts_outlive = mesh.members > 1 and traits.parts_outlive
    is_alone = most == 1
    if mesh.members > 1:  # servers of parts do not know how to do without a worker
        is_alone = traits.servers is not None or (mesh.replicas == 1 and not (parts_outlive and replace))
    if is_alone:
        return None
    return Elastic(
        most=most,
        replace=replace,
        stall_s=stall_s(),
        group_size=mesh.members,
        replicas_equal=traits.synchronous,
        parts_outlive=parts_outlive,
    )


def admit_hosts(strategy: strategies.Strategy) -> None:
    """Refuse a strategy that is not for hosts that come and go."""
    traits = strategy.traits
    if not (traits.servers.elastic if traits.servers is not None else traits.lockstep):
        raise UsageError(
            "--hosts is for strategies whose workers take every step together, and for servers without `cache` and "
            f"`every`, and {strategies.describe(strategy)} is not one of them; use torchrun, mpirun or Slurm for it"
        )


def stall_s() -> float:
    """After how many seconds of silence, or without a step, a process is looked at more closely."""
    return _seconds(STALL_S, coordination.STALL_S)


def wait_s() -> float:
    """For how long a host that has joined waits for the first host of its run."""
    return _seconds(WAIT_S, first_host.WAIT_S)


def _seconds(variable: str, default: float) -> float:
    given = os.environ.get(variable, "")
    try:
        seconds = float(given or default)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise UsageError(f"{variable}={given}: it must be a number of seconds above 0")
    return seconds


def again_terms(mesh: Mesh, command: list[str], resume: list[str], replace: int | None) -> Restart | None:
    """How a run whose replicas are in parts goes on after a death; `resume` makes the command go on where it was."""
    if mesh.members == 1:
        return None
    return Restart(command=command, resume=resume, times=REPLACE if replace is None else replace)


def admit_workers(workers: int, most: int, servers: int, hosts: str | None) -> None:
    """Refuse more processes than this host can hold; those that join from other hosts are none of its business."""
    asked = f"--workers {workers}" if most <= workers else f"--workers {workers}:{most}"
    if servers:
        asked += f" --servers {servers}"
    room.admit((workers if hosts else max(workers, most)) + max(0, servers), asked)
    room.raise_descriptor_limit()


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


def or_auto(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """How an option is read that may be left to the planner."""

    def read_or_auto(text: str) -> Any:
        return text if text == AUTO else read(text)

    read_or_auto.__name__ = read.__name__  # which argparse says in its errors
    return read_or_auto


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
    debug: int | None = None,
    stream: TextIO | None = None,
) -> Outcome:
    """Start the workers, and show their progress on `stream`, by default standard error, until they end.

    With `pass_output`, what they print goes to our standard output where that is a file or a pipe; on a terminal
    everything is shown above the progress bar. With `again`, a run that cannot change begins again after a death. With
    `debug` that worker has the terminal, and nothing else is shown on it but what happens to the run.
    """
    refuse_several(elastic.most if elastic and not elastic.hosts else workers)
    layout = cores.layout(workers, threads, servers)
    _say_first(elastic, layout, stream)
    with _display(run, workers, debug, stream) as display:
        has_hosts = elastic is not None and elastic.hosts > 0
        shown = Shown(display, run, workers, servers, has_hosts=has_hosts, is_debugged=debug is not None)

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
                    debug=debug,
                ),
                on_tick=display.refresh,
                on_line=shown.line,
                on_output=shown.output if pass_output and not sys.stdout.isatty() else None,
                elastic=elastic,
                on_event=shown.event,
                steps=lambda: display.digest.steps_of_all,
                stall_s=stall_s(),
            )

        outcome = again.run(attempt, run, shown.event) if again else attempt(command)
    return replace(outcome, step=display.digest.step)


def _say_first(elastic: Elastic | None, layout: CoreLayout, stream: TextIO | None) -> None:
    if elastic and elastic.hosts:
        address = elastic.address.rpartition(":")[0]
        say(open_between_hosts.sentence(f"a free port of {address}"), stream)
    say(cores.text(layout), stream)


@contextmanager
def _display(run: Path, workers: int, debug: int | None, stream: TextIO | None) -> Iterator[Display]:
    """The live display; one that is not seen where a worker has the terminal."""
    if debug is None:
        with Display(run, workers, stream=stream) as display:
            yield display
        return
    said = f"worker {debug} has this terminal; what the others print is in {run / FOLDER}"
    say(said)
    with open(os.devnull, "w") as unseen, Display(run, workers, stream=unseen) as display:
        yield display
