"""`manyhands plan`: measure or remember, predict every way of distributing a job, choose one, and say why."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.bars import measuring
from manyhands.cli.measured_job import add_words, job_of
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.errors import UsageError
from manyhands.launching.words import say

if TYPE_CHECKING:  # the planner takes a moment to load
    from manyhands.planner.candidates import WayLimits
    from manyhands.planner.facts import Facts
    from manyhands.planner.measure import ProbedJob

EXAMPLES = """\
examples:
  manyhands plan --model vgg16 --data cifar10          the best ways on this machine, and why the first one
  manyhands plan job.toml --explain                    the numbers behind each term
  manyhands plan script.py --lr 0.1                    your own script, measured up to its first steps
  manyhands plan --model vgg16 --data cifar10 --cluster cluster.toml    machines that are not here
  manyhands plan --cluster cluster.toml --within 2h    the cheapest number of them that is done in 2 hours
  manyhands plan --json > ways.json                    all of it, for programs
  manyhands plan --svg plan.svg                        the predicted steps as a picture

This machine is measured once with the job (about 20 s), and what was found is kept; `manyhands probe` measures again.
The line marked → is the fastest way whose steps equal those of one process, and the simplest of those that cannot be
told apart (=). `train --strategy auto --workers auto` would run it, but keeps to the placement of --placement. Other
ways are shown for what they are.

a cluster file has kinds of hosts and the link between them:
  [[hosts]]
  kind = "here"                 # as this machine was measured
  count = 2
  [[hosts]]
  kind = "c7i.2xlarge"          # never measured: scaled by two reference kernels, with a wider interval
  count = 6
  cores = 8
  memory_gb = 16
  gflops_per_core = 70
  gbytes_per_s_per_core = 9
  cost_per_hour = 0.36
  failures_per_hour = 0.0005
  [link]
  gbit_per_s = 10
  latency_us = 60
"""

_LIMITS = ("strategy", "placement", "workers", "threads", "servers")

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan",
        help="measure, predict every way of distributing a job, choose, explain",
        description="Predict every way of distributing a job here, or on machines that are not here, and choose one.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_job(parser)
    _add_limits(parser)
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="hosts, links, failures and cost, in TOML"
    )
    parser.add_argument(
        "--within",
        type=_seconds,
        metavar="T",
        help="with --cluster: the cheapest way that is done in 90min, 2h, 1d",
    )
    parser.add_argument("--explain", action="store_true", help="the numbers behind each term")
    parser.add_argument(
        "--json", action="store_true", help="print all of it as JSON and nothing else on stdout"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the predicted steps as a picture")
    add_words(parser, "what to plan")
    parser.set_defaults(run=run)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="M", help="a name of `list models`, or package.module:callable")
    parser.add_argument("--data", metavar="D", help="a name of `list data`, or package.module:callable")
    parser.add_argument("--batch", type=int, metavar="B", help="samples per worker and step (default 32)")
    parser.add_argument("--optimizer", metavar="O", help="as sgd:lr=0.05,momentum=0.9")
    parser.add_argument(
        "--epochs", type=float, metavar="N", help="for the time that a run takes (default: the file's, or 12)"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", metavar="S", help="plan this strategy alone")
    parser.add_argument("--placement", metavar="P", help="plan this placement alone")
    parser.add_argument("--workers", type=int, metavar="N", help="plan so many workers alone")
    parser.add_argument("--threads", type=int, metavar="N", help="plan so many threads per worker alone")
    parser.add_argument(
        "--servers", type=int, metavar="N", help="plan so many servers, for strategies with servers"
    )


def _seconds(text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 90min, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def run(options: argparse.Namespace) -> int:
    if own_rank_info().launcher != "alone":
        raise UsageError(
            "manyhands plan measures a host by itself; start it as one process, without torchrun or mpirun"
        )
    _check(options)
    job = job_of(options)
    from manyhands.cli import plan_report
    from manyhands.planner.candidates import WayLimits
    from manyhands.planner.search import search

    limits = {name: getattr(options, name) for name in _LIMITS}
    wanted = WayLimits(**limits, optimizer=str(job.known_by.get("optimizer") or "") or None)
    _check_names(wanted)
    facts = _facts(options, job)
    choice = search(facts, wanted)
    report = plan_report.PlanReport(choice=choice, epochs=options.epochs or job.epochs or 12)
    if options.cluster is not None:
        report = plan_report.with_curves(report, options.within)
    if options.svg is not None:
        _write(options.svg, report)
    plan_report.show(report, as_json=options.json, explains=options.explain)
    if options.svg is not None:
        say(f"picture   {options.svg}")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("workers", "threads", "servers", "epochs", "batch"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"--{name} {value:g}: it must be above 0")
    if options.within is not None and options.cluster is None:
        raise UsageError("--within is for --cluster FILE, which says what hosts there are")


def _check_names(wanted: "WayLimits") -> None:
    from manyhands import placement as placements
    from manyhands import strategies

    if wanted.strategy is not None:
        strategies.parse(wanted.strategy)
    if wanted.placement is not None:
        placements.parse(wanted.placement)


def _facts(options: argparse.Namespace, job: "ProbedJob") -> "Facts":
    import msgspec

    from manyhands.planner import this_host
    from manyhands.planner.cluster_file import cluster_of, words_in

    words = None if options.cluster is None else words_in(options.cluster)  # before anything is measured
    with measuring() as report:
        found = this_host.measured(
            job,
            report=report,
            on_measure=lambda why: say(f"plan      this host is measured with {job.name}, since {why}"),
        )
    facts = found.facts(options.strategy)
    if words is None:
        return facts
    (here,) = facts.cluster.hosts
    return msgspec.structs.replace(facts, cluster=cluster_of(words, here.host))


def _write(path: Path, report: Any) -> None:
    from manyhands.planner.drawing import svg

    title = (
        f"Predicted step, {report.choice.facts.model.name}, batch {report.choice.facts.batch}: µs per sample"
    )
    try:
        path.write_text(svg(report.choice.table, title))
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror}); give --svg a path that can be written"
        ) from None
