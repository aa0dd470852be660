"""`manyhands probe`: measure this host with a job, keep what was found, and print it."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.bars import measuring
from manyhands.cli.measured_job import add_words, job_of
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.errors import UsageError
from manyhands.launching.ending import end_of_run, script_goes_on, shown
from manyhands.launching.user_code import LaunchSettings, launch
from manyhands.launching.words import say

if TYPE_CHECKING:  # the planner takes a moment to load
    from manyhands.planner.facts import SplitFacts
    from manyhands.planner.measure import HostProbe
    from manyhands.planner.this_host import HostMeasured

EXAMPLES = """\
examples:
  manyhands probe                                    this host with the default job
  manyhands probe --model resnet20 --data cifar10    with another one
  manyhands probe job.toml                           with that of a spec file
  manyhands probe script.py --lr 0.1                 with your script, up to its first steps
  manyhands probe --hosts 2@10.0.0.1 --out runs/links    the links between two hosts: here ...
  manyhands launch --join runs/links                 ... and there, with a copy of runs/links/join.json
  manyhands probe --json > probe.json                all coefficients, with their bootstrap draws

Every split of the cores into workers × threads runs at once, as a run of its own with the job's own code, and they
take turns of a tenth of a second. A split that crashes or does not fit is named with the reason. What was found is
kept under ~/.cache/manyhands (XDG_CACHE_HOME moves it), where `train --workers auto` and `plan` find it.

A script runs as a whole up to its first steps, once for each split: what it writes before them, it writes then.
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "probe",
        help="measure this host with a job, for `plan` and `auto`",
        description="Measure which split of this host's cores trains a job fastest, and what its parts cost.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="M", help="a name of `list models`, or package.module:callable")
    parser.add_argument("--data", metavar="D", help="a name of `list data`, or package.module:callable")
    parser.add_argument("--batch", type=int, metavar="B", help="samples per worker and step (default 32)")
    parser.add_argument("--optimizer", metavar="O", help="as sgd:lr=0.05,momentum=0.9")
    parser.add_argument(
        "--json", action="store_true", help="print what was found as JSON, and nothing else on stdout"
    )
    parser.add_argument(
        "--hosts",
        metavar="N",
        help="measure the links between N hosts, the others by `launch --join`; 2@10.0.0.1 says at which address",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="with --hosts: the directory to join")
    add_words(parser, "what to measure the host with")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if own_rank_info().launcher != "alone":
        raise UsageError(
            "manyhands probe measures a host by itself; start it as one process, without torchrun or mpirun"
        )
    if options.hosts is not None:
        return _probe_links(options)
    if options.out is not None:
        raise UsageError("--out is for --hosts, whose other hosts join the run in it; leave it out")
    from manyhands.planner import this_host

    job = job_of(options)
    with measuring() as report:
        found = this_host.measured(job, anew=True, report=report)
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found.probe)).decode())
    else:
        _show(found)
    return 0


def _probe_links(options: argparse.Namespace) -> int:
    """A run of one worker on each host, in which they send each other messages."""
    given = [
        name for name in ("job", "module", "model", "data", "batch", "optimizer") if getattr(options, name)
    ]
    if given:
        raise UsageError(f"links are measured without a job; leave {given[0]} out with --hosts")
    if options.out is None:
        raise UsageError(
            "--hosts needs --out DIR, which the other hosts join: `manyhands launch --join DIR` there"
        )
    places: list[Path] = []
    outcome = launch(
        LaunchSettings(workers=(1, 1), out=options.out),
        ["-m", "manyhands.planner.link_worker"],
        "links",
        hosts=options.hosts,
        at_end=lambda out, outcome: places.append(out),
    )
    code = end_of_run(outcome, places[0], script_goes_on)
    if outcome.ok:
        _show_links(places[0], as_json=options.json)
    return code


def _show_links(out: Path, *, as_json: bool) -> None:
    """What was measured, and the words for a cluster file."""
    import msgspec

    from manyhands.planner.links import read_links

    found = read_links(out)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    link = found.link
    for name, (latency_s, bytes_per_s) in found.pairs.items():
        print(f"hosts {name:<8} {latency_s * 1e6:>8,.0f} µs {bytes_per_s * 8 / 1e9:>8.3f} Gbit/s")
    print("\nfor a cluster file of `manyhands plan`:\n[link]")
    print(f"gbit_per_s = {8e-9 / link.s_per_byte.value:.4g}")
    print(f"latency_us = {link.latency_s.value * 1e6:.4g}")
    print(f"both_ways = {link.both_ways.value:.3g}          # 1: each direction has its own capacity")
    print(f"cpu_ns_per_byte = {link.cpu_s_per_byte.value * 1e9:.3g}")
    print(f"shared = {'true' if link.shared else 'false'}")


def _show(found: "HostMeasured") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    probe, console = found.probe, Console(highlight=False, soft_wrap=True)
    host, model = probe.host, probe.model
    console.print(
        f"host      {host.cores} core{'s' * (host.cores > 1)}, {host.memory_bytes / 1e9:.1f} GB free; one core: "
        f"{host.kernels.flops_per_s / 1e9:,.0f} GFLOP/s in its cache, {host.kernels.bytes_per_s / 1e9:,.0f} GB/s "
        "through memory"
    )
    console.print(
        f"job       {escape(model.name)}: {model.parameters:,} parameters, {probe.batch} samples per worker and step, "
        f"{model.forward_share:.0%} of a pass is forward"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    best = min(probe.step_s.values())
    for split in host.splits:
        table.add_row(*_row(split, probe, best))
    console.print(table)
    console.print(
        "[dim]pass and update: processor milliseconds of one worker, all workers of the host at it[/]"
    )
    for split in host.splits:
        if split.error:
            console.print(f"{split.processes} × {split.threads} cannot run: {escape(split.error)}")
    console.print(
        f"[bold]best      {probe.chosen}[/]: {probe.verdict}, after {probe.rounds} rounds and {probe.took_s:.0f} s; "
        f"the same split differed from itself by {probe.indistinct:.1%} (A/A)"
    )
    for note in probe.notes:
        say(f"note: {note}", sys.stdout)
    from manyhands.planner.cache_folder import folder

    console.print(f"kept in   {escape(shown(folder()))}")


_COLUMNS = (
    ("workers × threads", "left"),
    ("samples/s", "right"),
    ("of best", "right"),
    ("pass ms", "right"),
    ("ms/sample", "right"),
    ("update ms", "right"),
    ("wall ÷ CPU", "right"),
)


def _row(split: "SplitFacts", probe: "HostProbe", best: float) -> list[str]:
    name = f"{split.processes} × {split.threads}"
    if split.error or name not in probe.step_s:
        return [name, "-", "-", "-", "-", "-", "-"]
    cost = probe.step_s[name]
    whole = split.pass_cpu_s.value + probe.batch * split.sample_cpu_s.value
    return [
        name,
        f"{1 / cost:,.0f}",
        f"{best / cost:.0%}",
        f"{whole * 1e3:,.2f}",
        f"{split.sample_cpu_s.value * 1e3:,.3f}",
        f"{split.update_cpu_s.value * probe.model.parameters * 1e3:,.2f}",
        f"{split.wall_per_cpu.value:.2f}",
    ]
