"""People's own code in several workers: what `manyhands launch` and `mh.run` have in common."""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from manyhands import placement, strategies
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launchers import local
from manyhands.comm import codecs
from manyhands.errors import UnknownName, UsageError
from manyhands.launching.run import (
    AUTO,
    admit_workers,
    again_terms,
    elastic_terms,
    new_run,
    or_auto,
    run_workers,
    worker_range,
)

MEASURED = ("strategy", "workers", "threads")
"""What a command line may leave to the planner."""
WORKERS = (2, 2)
"""How many there are at first and at most, where nothing is said."""


def _said(read: Callable[[str], Any], metavar: str, text: str) -> dict[str, Any]:
    """How a setting is read, and what the command line says of it."""
    return {"read": read, "metavar": metavar, "help": text}


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Each is an option of `manyhands launch` and a keyword of `mh.run`."""

    strategy: str = field(default=strategies.DEFAULT, metadata=_said(str, "S", "a name of `list strategies`"))
    placement: str = field(default=placement.DEFAULT, metadata=_said(str, "P", "a name of `list placements`"))
    codec: str = field(
        default=codecs.DEFAULT,
        metadata=_said(str, "C", "a name of `list codecs`, for gradients between hosts"),
    )
    workers: tuple[int, int] | None = field(
        default=None, metadata=_said(worker_range, "N", "processes (default 2); 2:6 lets others join up to 6")
    )
    servers: int | None = field(
        default=None,
        metadata=_said(
            int,
            "N",
            "processes that own parameters (default 0); with --hosts and --join those of this host, and copies=1 in "
            "--strategy keeps what each has on another host too",
        ),
    )
    threads: int | None = field(
        default=None, metadata=_said(int, "N", "threads per worker (default: cores ÷ workers)")
    )
    out: Path | None = field(
        default=None, metadata=_said(Path, "DIR", "the run's directory (default: a new one under runs/)")
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    for one in fields(LaunchSettings):
        read, metavar, said = (one.metadata[name] for name in ("read", "metavar", "help"))
        if one.name in MEASURED:
            read, said = or_auto(read), f"{said}; auto measures, and chooses"
        parser.add_argument(f"--{one.name}", type=read, metavar=metavar, default=one.default, help=said)


def from_options(options: argparse.Namespace) -> LaunchSettings:
    return LaunchSettings(**{one.name: getattr(options, one.name) for one in fields(LaunchSettings)})


def from_keywords(given: Mapping[str, Any]) -> LaunchSettings:
    """The settings that a call names; None is what it is when it is left out."""
    known = {one.name: one for one in fields(LaunchSettings)}
    for name in given:
        if name not in known:
            raise UnknownName("setting", name, known)
        if given[name] == AUTO and name in MEASURED:
            raise UsageError(
                f"{name}={AUTO!r}: a function cannot be measured before it runs; put it into a script, see what "
                f"`manyhands launch --{name} auto script.py` chooses, and name that"
            )
    return LaunchSettings(
        **{name: _read(known[name], value) for name, value in given.items() if value is not None}
    )


def _read(setting: Field[Any], value: Any) -> Any:
    try:
        return setting.metadata["read"](str(value))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{setting.name}={value!r}: {error}") from None
    except ValueError:
        raise UsageError(f"{setting.name}={value!r}: it must be a whole number") from None


def admitted_mesh(settings: LaunchSettings, workers: int, servers: int) -> placement.Mesh:
    """Refuse what strategy, placement and workers cannot be together; returns the shape that they form."""
    strategy, placed = strategies.parse(settings.strategy), placement.parse(settings.placement)
    mesh = placed.mesh(workers)
    asked = strategies.Asked(workers=mesh.replicas, servers=servers)
    placement.admit(placed, mesh, strategy, asked)
    strategies.admit(strategy, asked)
    codec, name = codecs.parse(settings.codec), strategies.describe(strategy)
    strategies.admit_codec(codec, strategy, name, members=mesh.members)
    return mesh


def launch(
    settings: LaunchSettings,
    command: list[str],
    name: str,
    *,
    hosts: str | None = None,
    debug: int | None = None,
    stream: TextIO | None = None,
    at_end: Callable[[Path, Outcome], None] = lambda out, outcome: None,
) -> Outcome:
    """Run the command in the workers of this host, and show it on `stream` to its end; `name` is for its directory."""
    workers, most = settings.workers or WORKERS
    if workers < 1:
        raise UsageError(f"--workers {workers}: it must be at least 1")
    servers = settings.servers or 0
    admit_workers(workers, most, servers, hosts)
    mesh = admitted_mesh(settings, workers, servers)
    if debug is not None and not 0 <= debug < workers:  # only a worker of this launcher can have its terminal
        raise UsageError(f"--debug {debug}: there are workers 0 to {workers - 1}; name one of them")
    with new_run(settings.out, f"{name}-{settings.strategy}", keeps_logs=debug is not None) as out:
        outcome = run_workers(
            command,
            run=out,
            elastic=elastic_terms(strategies.parse(settings.strategy), mesh, most, None, hosts),
            again=again_terms(mesh, command, [], None),  # scripts resume by themselves
            workers=workers,
            threads=settings.threads,
            servers=servers,
            pass_output=True,
            debug=debug,
            environ={
                local.STRATEGY: settings.strategy,
                local.PLACEMENT: settings.placement,
                local.CODEC: settings.codec,
            },
            stream=stream or sys.stderr,
        )
        at_end(out, outcome)
        return outcome
