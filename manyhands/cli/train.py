"""`manyhands train`: a model, data and a strategy by name, or by a spec file with the same words."""

import argparse
import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from manyhands import strategies
from manyhands.checkpoint.index import latest
from manyhands.cli.bars import transfers
from manyhands.cli.choosing import held_against, left_to_planner
from manyhands.cli.planned import check, note_on, planned
from manyhands.cli.report import report
from manyhands.cluster.launcher import cores
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker import compiler
from manyhands.errors import ManyhandsError, UsageError
from manyhands.job.plan import Plan
from manyhands.launching.ending import end_of_run, train_goes_on
from manyhands.launching.run import (
    admit_workers,
    again_terms,
    elastic_terms,
    forget_records,
    make_directory,
    new_run,
    or_auto,
    read_summary,
    run_workers,
    worker_range,
)
from manyhands.launching.words import say

EXAMPLES = f"""\
examples:
  manyhands train                                        the default job: cnn on digits, 2 workers
  manyhands train --model resnet20 --data cifar10 --fetch --epochs 20 --workers 4
  manyhands train --model mlp:hidden=512-512 --optimizer adamw:lr=0.001
  manyhands train --strategy auto --workers auto         measure for some seconds, choose, and say why
  manyhands train --strategy {strategies.DEFAULT}:topology=ring --workers 4
  manyhands train --placement pipeline:stages=2,microbatches=8 --model vgg16 --workers 2
  manyhands train --weights runs/a --head new --data images:photos    fine-tuning, for other classes
  manyhands train job.toml --epochs 3                    flags override the file
  manyhands train --out runs/a --save-every 10min --keep 5
  manyhands train --out runs/a --resume                  go on where that run stopped, on other --workers if need be
  manyhands train --hosts 2@10.0.0.1 --out runs/a        on two hosts: this one ...
  manyhands launch --join runs/a --workers 2             ... and, there, with a copy of runs/a/join.json
  torchrun --nproc-per-node 2 --no-python manyhands train    joins the world of torchrun, mpirun or Slurm

a spec file has the same words:
  [model]
  name = "resnet20"
  [data]
  name = "cifar10"
  [strategy]
  name = "{strategies.DEFAULT}"
  [cluster]
  workers = 4
  [train]
  epochs = 20
  batch = 32
  optimizer = "sgd:lr=0.1,momentum=0.9,weight_decay=0.0001"
  schedule = "cosine"
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a model of the zoo, or your own, on data by name",
        description="Train a model on data with any strategy; `manyhands list models` and so on says which.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in (_add_job, _add_cluster, _add_training, _add_run):
        add(parser)
    parser.set_defaults(run=run)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec", nargs="?", type=Path, metavar="SPEC.toml", help="a spec file, or plan.json of a run"
    )
    parser.add_argument("--model", metavar="M", help="a name of `list models`, or package.module:callable")
    parser.add_argument("--data", metavar="D", help="a name of `list data`, or package.module:callable")
    parser.add_argument(
        "--strategy",
        metavar="S",
        help="a name of `list strategies`, with settings after a colon; auto measures, and chooses",
    )
    parser.add_argument(
        "--placement", metavar="P", help="a name of `list placements`: how a replica is laid over workers"
    )
    parser.add_argument(
        "--codec", metavar="C", help="a name of `list codecs`: how gradients travel between hosts"
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=or_auto(worker_range),
        metavar="N",
        help="processes that compute gradients (default 2); 2:6 lets others join up to 6; auto measures",
    )
    parser.add_argument(
        "--hosts",
        metavar="N",
        help="begin when N hosts have come, the others by `launch --join`; 2@10.0.0.1 says at which address",
    )
    parser.add_argument("--servers", type=int, metavar="N", help="processes that own parameters (default 0)")
    parser.add_argument(
        "--threads",
        type=or_auto(int),
        metavar="N",
        help="threads per worker (default: cores ÷ workers; auto measures)",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default 12)")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="stop after N steps of the whole run: as many samples as N steps of its first workers",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help="samples per worker and step (default 32, or what the strategy wants)",
    )
    parser.add_argument(
        "--optimizer",
        metavar="O",
        help="as sgd:lr=0.05,momentum=0.9 (default: what suits model and strategy)",
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="begin with these: a .safetensors file, what `export` wrote, or a run (fine-tuning)",
    )
    parser.add_argument(
        "--head", choices=["new"], help="new: --weights leaves the last layer alone, for other classes"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="same seed, same plan: the same parameters, to the bit"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda: one GPU per worker")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's directory (default: a new one under runs/)"
    )
    parser.add_argument(
        "--save-every",
        metavar="T",
        help="epoch, 500steps, 10min or never: when to write a checkpoint (default: epoch; and at the end)",
    )
    parser.add_argument("--keep", type=int, metavar="N", help="checkpoints that remain (default 3)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    parser.add_argument("--fetch", action="store_true", help="download published data that is not there yet")
    parser.add_argument(
        "--tensorboard", action="store_true", help="write TensorBoard event files into the run"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the summary as JSON and nothing else on stdout"
    )


def run(options: argparse.Namespace) -> int:
    rank_info = own_rank_info()
    if options.resume and options.out is None:
        raise UsageError("--resume needs --out DIR, the directory of the run to go on with")
    plan = planned(options, rank_info)
    if rank_info.launcher == "alone":
        cluster = plan.cluster
        most = cluster.most_workers or cluster.workers
        admit_workers(cluster.workers, most, cluster.servers, cluster.hosts)
    check(plan, options)
    _check_directory(options)
    if options.fetch:
        _fetch(plan, rank_info)
    if rank_info.launcher != "alone":
        return _join(plan, rank_info, options)
    plan, chosen = left_to_planner(plan)
    _check_layers(plan)
    plan, why = _settled(plan)
    note = note_on(options)
    with new_run(options.out, f"{plan.model}-{plan.data}-{plan.strategy}") as out:
        if not options.resume:
            forget_records(out)
        for line in filter(None, (note, why)):
            say(line)
        command = ["-m", "manyhands.job.declared", plan.encode().decode()]
        command += ["--resume"] if options.resume else []
        outcome = run_workers(
            command,
            run=out,
            workers=plan.cluster.workers,
            threads=plan.cluster.threads,
            servers=plan.cluster.servers,
            environ={},
            elastic=elastic_terms(
                strategies.parse(plan.strategy),
                plan.mesh(),
                plan.cluster.most_workers or plan.cluster.workers,
                plan.cluster.replace,
                plan.cluster.hosts,
            ),
            again=again_terms(plan.mesh(), command, ["--resume"], plan.cluster.replace),
        )
    code = end_of_run(outcome, out, train_goes_on)
    if code == 0:
        expected = held_against(chosen, out)  # which writes into the summary
        report(_summary(out), out, options, expected=expected)
    return code


def _settled(plan: Plan) -> tuple[Plan, str]:
    """The plan with the defaults filled in, and the reason for them. Where workers of other hosts come, the workers
    settle it together: how many there are and which cores they have is not known yet."""
    cluster = plan.cluster
    if cluster.hosts is not None:
        return plan, ""
    plan, why = plan.on_fair_terms()
    # Written down: the same threads give the same bits, on a machine with other cores too.
    threads = cores.layout(cluster.workers, cluster.threads, cluster.servers).threads
    return msgspec.structs.replace(plan, cluster=msgspec.structs.replace(cluster, threads=threads)), why


def _check_directory(options: argparse.Namespace) -> None:
    """Neither resume from nothing, nor let a new run push the checkpoints of an old one out."""
    if options.out is None:
        return
    has_checkpoint = latest(options.out / "checkpoints") is not None
    if options.resume and not has_checkpoint:
        raise UsageError(
            f"there is no checkpoint in {options.out} to resume from; start the run without --resume"
        )
    if has_checkpoint and not options.resume:
        raise UsageError(
            f"{options.out} holds a run with checkpoints; go on with --resume, or choose another --out"
        )


def _check_layers(plan: Plan) -> None:
    """Where the strategy's settings name layers, refuse names that the model does not have, before anything starts."""
    strategy = strategies.parse(plan.strategy)
    service = strategy.traits.servers
    if service and service.every:
        from manyhands.job import declared  # takes seconds: only then

        _, model = declared.load(plan)
        strategies.admit_model(strategy, [name for name, _ in model.named_parameters()])


def _join(plan: Plan, rank_info: RankInfo, options: argparse.Namespace) -> int:
    """Be one worker of a world that another launcher started."""
    if options.out is not None:
        out = make_directory(options.out)
        os.environ[local.RUN_DIR] = str(out)
        if rank_info.rank == 0 and not options.resume:
            forget_records(out)  # no worker writes new ones before worker 0 has joined
    compiler.leave_unloaded()
    from manyhands.job import declared

    def say(line: str) -> None:
        if rank_info.rank == 0:
            print(line, file=sys.stderr, flush=True)

    session = declared.run(plan, resume=options.resume, say=say)
    session.finish()
    if rank_info.rank == 0:
        report(session.summary(), session.out, options)
    return 0


def _fetch(plan: Plan, rank_info: RankInfo) -> None:
    """Bring the data before any worker asks for it: one worker of a host does, the others wait for it."""
    from manyhands import data
    from manyhands.data.files import data_directory

    directory = data_directory(None)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".fetch.lock").open("w")
    except OSError as error:
        raise UsageError(
            f"cannot write to the data directory {directory} ({error.strerror}); set MANYHANDS_DATA"
        ) from None
    with lock, transfers(visible=rank_info.rank == 0) as progress:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data.load(plan.data, seed=plan.train.seed, fetch=True, progress=progress)


def _summary(out: Path) -> dict[str, Any]:
    found = read_summary(out)
    if found is None:  # all workers that this host began with have died
        raise ManyhandsError(
            "the run has ended well, but on another host: its summary and its checkpoints are where worker 0 was"
        )
    return found
