"""The job that a command measures: a model and data by name, a spec file, a script or a module."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.cli.planned import check, planned
from manyhands.cli.script import command_of, is_script
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.errors import UsageError

if TYPE_CHECKING:  # the planner takes a moment to load
    from manyhands.planner.measure import ProbedJob

OF_A_JOB = ("model", "data", "batch", "optimizer")
OF_A_RUN = ("resume", "strategy", "placement", "workers", "threads", "servers", "hosts", "epochs", "steps")
"""What says how a job runs, and is not measured."""


def add_words(parser: argparse.ArgumentParser, what: str) -> None:
    """What stands at the end of the command line: a spec file, or a script with its own arguments."""
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="package.module …",
        help="a module in place of a script",
    )
    parser.add_argument("job", nargs="?", metavar="SPEC.toml|script.py", help=what)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's own arguments")


def job_of(options: argparse.Namespace) -> "ProbedJob":
    from manyhands.planner import jobs

    if options.module is not None or (options.job and is_script(options.job)):
        given = [name for name in OF_A_JOB if getattr(options, name) is not None]
        if given:
            raise UsageError(f"--{given[0]} is for declared jobs, and a script has its own; leave it out")
        command = command_of(
            argparse.Namespace(module=options.module, script=options.job, arguments=options.arguments)
        )
        return jobs.of_script(command.words, command.name)
    if options.arguments:
        raise UsageError(
            f"{' '.join(options.arguments)!r} stands after a spec file; write options before it, or name a script"
        )
    spec = Path(options.job) if options.job else None
    declared = argparse.Namespace(**{**vars(options), **dict.fromkeys(OF_A_RUN), "spec": spec})
    plan = planned(declared, own_rank_info())
    check(plan, declared)
    return jobs.of_plan(plan)
