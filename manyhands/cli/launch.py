"""`manyhands launch`: the user's own script in every worker."""

import argparse
import itertools
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyhands import strategies
from manyhands.cli.choosing import held_against, refuse_auto, settle_launch
from manyhands.cli.joiner import join_run
from manyhands.cli.script import ScriptCommand, command_of
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.errors import UsageError
from manyhands.launching.ending import end_of_run, say_run, script_goes_on
from manyhands.launching.run import check_workers, make_directory, refuse_hosts, with_servers
from manyhands.launching.user_code import LaunchSettings, add_options, admitted_mesh, from_options, launch
from manyhands.launching.words import say

OTHERS = ("join", "hosts", "debug")  # options that are no settings of `mh.run`

EXAMPLES = f"""\
examples:
  manyhands launch script.py                          2 workers
  manyhands launch --workers 4 script.py --lr 0.1     what follows the script is the script's own
  manyhands launch --workers 4 -m package.train --lr 0.1    a module, as python -m runs it
  manyhands launch --debug 0 script.py                worker 0 has this terminal: breakpoint(), input()
  manyhands launch --strategy auto --workers auto script.py    measure for some seconds, and choose
  manyhands launch --strategy {strategies.DEFAULT}:topology=tree --workers 4 script.py
  manyhands launch --out runs/mine script.py          events, checkpoints and summary go there
  manyhands launch --workers 2:6 --out runs/mine script.py    2 workers, and others may join ...
  manyhands launch --join runs/mine                           ... like this
  manyhands launch --hosts 2@10.0.0.1 --out runs/mine script.py    on two hosts: this one ...
  manyhands launch --join runs/mine --workers 2                    ... and, there, with a copy of runs/mine/join.json

the script keeps its loop; only the step changes:
  import manyhands as mh
  session = mh.session(model, optimizer, loss)        # loss(model, batch) → mean over the batch
  for batch in session.batches(dataset, batch_size=32):
      session.step(batch)

in the script, also before the session: mh.rank(), mh.workers(), and `with mh.main_process_first():` for downloads;
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set. What each worker prints is also in logs/ of the run's
directory. A script without a session trains once in each worker: the end says so, and the exit code is 64.

`python script.py` alone is a world of one. Under torchrun, mpirun or Slurm the same command joins that world:
  torchrun --nproc-per-node 2 --no-python manyhands launch script.py
  mpirun -n 4 manyhands launch script.py
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "launch",
        help="run your own training script in several workers",
        description="Run a script that uses mh.session in several workers of this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--join", metavar="DIR", help="be one more worker of the run in that directory; the key is in it"
    )
    parser.add_argument(
        "--hosts",
        metavar="N",
        help="begin when N hosts have come, the others by --join; 2@10.0.0.1 says at which address",
    )
    _add_script(parser)
    parser.set_defaults(run=run)


def _add_script(parser: argparse.ArgumentParser) -> None:
    """What to run, and how to look into it."""
    parser.add_argument(
        "--debug",
        type=int,
        metavar="N",
        help="worker N gets this terminal, for pdb and input(); the others print into their logs alone",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="package.module …",
        help="run a module instead of a script, as python -m does",
    )
    parser.add_argument("script", metavar="script.py", nargs="?", help="your script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's own arguments")


def run(options: argparse.Namespace) -> int:
    if options.join is not None:
        if options.debug is not None:
            raise UsageError("--debug is for the workers that a run begins with; leave it out with --join")
        refuse_auto(options, "the run that --join enters has begun, and what it needs was chosen there")
        is_given = options.script is not None or options.module is not None
        words = command_of(options).words if is_given else []
        workers = options.workers[0] if options.workers else 1
        return join_run(options.join, words, workers, options.servers or 0)
    command = command_of(options)
    rank_info = with_servers(own_rank_info(), options.servers)
    if rank_info.launcher != "alone":
        refuse_hosts(options.hosts, rank_info)
        refuse_auto(options, f"{rank_info.launcher} has started this run and its {rank_info.workers} workers")
        return _join(options, command, rank_info)
    if misplaced := _own_option_of(options):
        say(
            f"note: `{misplaced}` stands after the script and goes to it; for manyhands, write it before the script"
        )
    chosen = settle_launch(options, command.words, command.name)
    places: list[Path] = []
    outcome = launch(
        from_options(options),
        command.words,
        command.name,
        hosts=options.hosts,
        debug=options.debug,
        at_end=lambda out, outcome: places.append(out),
    )
    code = end_of_run(outcome, places[0], script_goes_on)
    if outcome.ok:
        if planned := held_against(chosen, places[0]):
            say(f"plan      {planned}")
        say_run(places[0])
    return code


def _own_option_of(options: argparse.Namespace) -> str:
    """An option of `launch` that is written after the script, and not before it as well."""
    defaults = {one.name: one.default for one in fields(LaunchSettings)} | dict.fromkeys(OTHERS)
    words = [*options.arguments, *(options.module or [])[1:]]
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="-"):
        name, equals, _ = word.partition("=")
        if name[:2] == "--" and name[2:] in defaults and getattr(options, name[2:]) == defaults[name[2:]]:
            return word if equals or following.startswith("-") else f"{word} {following}"
    return ""


def _join(options: argparse.Namespace, command: ScriptCommand, rank_info: RankInfo) -> int:
    """Run the script here, as one worker of a world that another launcher started."""
    if options.debug is not None:
        raise UsageError(
            f"--debug is for runs of our own launcher, and {rank_info.launcher} has started this one; leave it out"
        )
    check_workers(options.workers and options.workers[0], rank_info)
    admitted_mesh(from_options(options), rank_info.workers, rank_info.servers)
    if options.threads is not None:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    os.environ |= {
        local.STRATEGY: options.strategy,
        local.PLACEMENT: options.placement,
        local.CODEC: options.codec,
    }
    if options.out is not None:
        os.environ[local.RUN_DIR] = str(make_directory(options.out))
    from manyhands.cluster.worker import entry

    sys.argv = [sys.argv[0], *command.words]
    entry.main()
    return 0
