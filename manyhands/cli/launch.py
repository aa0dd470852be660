"""`manyhands launch`: the user's own script in every worker."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from manyhands import placement, strategies
from manyhands.cli.run import (
    again_terms,
    check_workers,
    elastic_terms,
    join_run,
    make_directory,
    new_run,
    refuse_hosts,
    run_workers,
    with_servers,
    worker_range,
)
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.errors import UsageError

EXAMPLES = f"""\
examples:
  manyhands launch script.py                          2 workers
  manyhands launch --workers 4 script.py --lr 0.1     what follows the script is the script's own
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
    parser.add_argument(
        "--strategy", metavar="S", default=strategies.DEFAULT, help="a name of `list strategies`"
    )
    parser.add_argument(
        "--placement", metavar="P", default=placement.DEFAULT, help="a name of `list placements`"
    )
    parser.add_argument(
        "--workers",
        type=worker_range,
        metavar="N",
        help="processes (default 2); 2:6 lets others join up to 6",
    )
    parser.add_argument(
        "--servers",
        type=int,
        metavar="N",
        help="processes that own parameters (default 0); with --hosts and --join those of this host, and copies=1 in "
        "--strategy keeps what each has on another host too",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads per worker (default: cores ÷ workers)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's directory (default: a new one under runs/)"
    )
    parser.add_argument(
        "--join", metavar="DIR", help="be one more worker of the run in that directory; the key is in it"
    )
    parser.add_argument(
        "--hosts",
        metavar="N",
        help="begin when N hosts have come, the others by --join; 2@10.0.0.1 says at which address",
    )
    parser.add_argument("script", metavar="script.py", nargs="?", help="your script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's own arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.join is not None:
        command = [options.script, *options.arguments] if options.script else []
        workers = options.workers[0] if options.workers else 1
        return join_run(options.join, command, workers, options.servers or 0)
    if options.script is None:
        raise UsageError("name the script to run, as in manyhands launch script.py")
    script = Path(options.script)
    if not script.is_file():
        raise UsageError(f"there is no script {options.script!r} here; give the path of a Python file")
    rank_info = with_servers(own_rank_info(), options.servers)
    if rank_info.launcher != "alone":
        refuse_hosts(options.hosts, rank_info)
        return _join(options, rank_info)
    workers, most = options.workers or (2, 2)
    if workers < 1:
        raise UsageError(f"workers={workers}: it must be at least 1")
    servers = options.servers or 0
    mesh = _check(options, workers, servers)
    with new_run(options.out, f"{script.stem}-{options.strategy}") as out:
        command = [str(script), *options.arguments]
        return run_workers(
            command,
            run=out,
            elastic=elastic_terms(strategies.parse(options.strategy), mesh, most, None, options.hosts),
            again=again_terms(mesh, command, [], None),  # scripts resume by themselves
            workers=workers,
            threads=options.threads,
            servers=servers,
            pass_output=True,
            environ={local.STRATEGY: options.strategy, local.PLACEMENT: options.placement},
        )


def _check(options: argparse.Namespace, workers: int, servers: int) -> placement.Mesh:
    """Refuse what strategy, placement and workers cannot be together; returns the shape that they form."""
    strategy, placed = strategies.parse(options.strategy), placement.parse(options.placement)
    mesh = placed.mesh(workers)
    asked = strategies.Asked(workers=mesh.replicas, servers=servers)
    placement.admit(placed, mesh, strategy, asked)
    strategies.admit(strategy, asked)
    return mesh


def _join(options: argparse.Namespace, rank_info: RankInfo) -> int:
    """Run the script here, as one worker of a world that another launcher started."""
    check_workers(options.workers and options.workers[0], rank_info)
    _check(options, rank_info.workers, rank_info.servers)
    if options.threads is not None:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    os.environ |= {local.STRATEGY: options.strategy, local.PLACEMENT: options.placement}
    if options.out is not None:
        os.environ[local.RUN_DIR] = str(make_directory(options.out))
    from manyhands.cluster.worker import entry

    sys.argv = [sys.argv[0], options.script, *options.arguments]
    entry.main()
    return 0
