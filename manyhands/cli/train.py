"""`manyhands train`: a model, data and a strategy by name, or by a spec file with the same words."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from manyhands import plan as plans
from manyhands.cli.running import new_run, run_workers
from manyhands.cluster.launchers import local
from manyhands.cluster.seat import Seat, own_seat
from manyhands.errors import UsageError
from manyhands.plan import Plan

EXAMPLES = """\
examples:
  manyhands train                                        the default job: cnn on digits, 2 workers
  manyhands train --model resnet20 --data cifar10 --fetch --epochs 20 --workers 4
  manyhands train --model mlp:hidden=512-512 --optimizer adamw:lr=0.001
  manyhands train --strategy all-reduce:topology=ring --workers 4
  manyhands train job.toml --epochs 3                    flags override the file
  manyhands train --out runs/a --resume                  go on where that run stopped
  torchrun --nproc-per-node 2 --no-python manyhands train    joins the world of torchrun, mpirun or Slurm

a spec file has the same words:
  [model]
  name = "resnet20"
  [data]
  name = "cifar10"
  [strategy]
  name = "all-reduce"
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
        description="Train a model on data with any strategy. `manyhands list models|data|strategies` shows the names.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", nargs="?", type=Path, metavar="SPEC.toml", help="a spec file, or plan.json of a run")
    parser.add_argument("--model", metavar="M", help="a name of `list models`, or package.module:callable")
    parser.add_argument("--data", metavar="D", help="a name of `list data`, or package.module:callable")
    parser.add_argument("--strategy", metavar="S", help="a name of `list strategies`, with settings after a colon")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that compute gradients (default 2)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads per worker (default: cores ÷ workers)")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default 12)")
    parser.add_argument("--steps", type=int, metavar="N", help="stop after this many steps")
    parser.add_argument("--batch", type=int, metavar="B", help="samples per worker and step (default 32)")
    parser.add_argument("--optimizer", metavar="O", help="as sgd:lr=0.05,momentum=0.9 (default: what suits the model)")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same plan: the same parameters, to the bit")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda: one GPU per worker")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's directory (default: a new one under runs/)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    parser.add_argument("--fetch", action="store_true", help="download published data that is not there yet")
    parser.add_argument("--tensorboard", action="store_true", help="write TensorBoard event files into the run")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    seat = own_seat()
    if options.resume and options.out is None:
        raise UsageError("--resume needs --out DIR, the directory of the run to go on with")
    plan = _plan(options, seat)
    plan.check()
    if options.fetch and seat.rank == 0:
        _fetch(plan)
    if seat.launcher != "alone":
        return _join(plan, seat, options)
    out = new_run(options.out, f"{plan.model}-{plan.data}-{plan.strategy}")
    plan.write(out / "plan.json")
    code = run_workers(
        ["-m", "manyhands.job", str(out / "plan.json"), *(["--resume"] if options.resume else [])],
        run=out,
        workers=plan.cluster.workers,
        threads=plan.cluster.threads,
        environ={},
    )
    if code == 0:
        _report(json.loads((out / "summary.json").read_text()), out, options)
    return code


def _plan(options: argparse.Namespace, seat: Seat) -> Plan:
    """The spec file, with what the flags say on top of it."""
    if options.spec is not None:
        plan = plans.read(options.spec)
    elif options.resume and (options.out / "plan.json").exists():
        plan = plans.read(options.out / "plan.json")
    else:
        plan = Plan()
    given = {key: value for key, value in vars(options).items() if value is not None}
    top = {key: given[key] for key in ("model", "data", "strategy") if key in given}
    cluster = {key: given[key] for key in ("workers", "threads", "device") if key in given}
    if seat.launcher != "alone":
        if cluster.get("workers", seat.size) != seat.size:
            raise UsageError(
                f"--workers {cluster['workers']} but {seat.launcher} started {seat.size}; leave --workers out, "
                f"or start {cluster['workers']} with {seat.launcher}"
            )
        cluster["workers"] = seat.size
    train = {key: given[key] for key in ("epochs", "steps", "batch", "optimizer", "seed") if key in given}
    if "steps" in train and "epochs" not in train and options.spec is None:
        train["epochs"] = 1_000_000  # the steps decide
    return msgspec.structs.replace(
        plan,
        **top,
        cluster=msgspec.structs.replace(plan.cluster, **cluster),
        train=msgspec.structs.replace(plan.train, **train),
    )


def _join(plan: Plan, seat: Seat, options: argparse.Namespace) -> int:
    """Be one worker of a world that someone else started."""
    if options.out is not None:
        out = new_run(options.out, "")
        os.environ[local.RUN_DIR] = str(out)
        if seat.rank == 0:
            plan.write(out / "plan.json")
    from manyhands import job

    def say(line: str) -> None:
        if seat.rank == 0:
            print(line, file=sys.stderr, flush=True)

    session = job.run(plan, resume=options.resume, on_epoch=say)
    session.close()
    if seat.rank == 0:
        _report(session.summary(), session.out, options)
    return 0


def _fetch(plan: Plan) -> None:
    """Bring the data before any worker asks for it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    from manyhands import data

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        data.load(plan.data, seed=plan.train.seed, fetch=True, progress=progress)


def _report(summary: dict[str, Any], out: Path | None, options: argparse.Namespace) -> None:
    """The result for a person, or as JSON for a program."""
    if options.tensorboard and out is not None:
        from manyhands.telemetry.tensorboard import export

        print(f"TensorBoard: {export(out)}", file=sys.stderr)
    if options.json:
        print(json.dumps(summary, indent=2))
        return
    from rich.console import Console

    say = Console(highlight=False, soft_wrap=True).print
    workers = summary["workers"]
    if summary["accuracy"] is not None:
        say(f"[bold]accuracy  {summary['accuracy'] * 100:.2f} %[/] on the held-out part, loss {summary['loss']:.4f}")
    else:
        say(f"[bold]loss      {summary['loss']:.4f}[/] on the held-out part")
    each = f" ({summary['samples_per_second'] / workers:,.0f} per worker)" if workers > 1 else ""
    say(f"speed     {summary['samples_per_second']:,.0f} samples/s with {workers} worker{'s'[: workers > 1]}{each}")
    say(f"took      {summary['wall_s']:.1f} s, {summary['steps']:,} steps, {summary['samples']:,} samples")
    if out is not None:
        say(f"run       {_relative(out)}")
    say("\nwhat to try next:")
    tries = [
        (f"manyhands train --model mlp --workers {workers * 2}", "another model, more workers"),
        ("manyhands train --model resnet20 --data cifar10 --fetch", "colour pictures"),
        ("manyhands list strategies", "other ways to distribute it"),
    ]
    if out is not None:
        tries.insert(0, (f"manyhands train {_relative(out)}/plan.json", "the same run again, to the bit"))
    width = max(len(command) for command, _ in tries)
    for command, why in tries:
        say(f"  {command:<{width}}  {why}")


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
