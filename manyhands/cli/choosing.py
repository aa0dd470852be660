"""What a command line leaves to the planner by `auto`: measured with a bar, chosen, said in one line."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from manyhands import spec
from manyhands.cli.bars import measuring
from manyhands.errors import UsageError
from manyhands.job.plan import Plan
from manyhands.launching.run import AUTO, read_summary
from manyhands.launching.words import say

if TYPE_CHECKING:  # the planner takes a moment to load
    from manyhands.planner.automatic import AutoWords, Chosen
    from manyhands.planner.measure import ProbedJob


def left_to_planner(plan: Plan) -> tuple[Plan, "Chosen | None"]:
    """The plan with what it left open; where that is nothing, the plan as it is."""
    if not plan.auto:
        return plan, None
    from manyhands.planner.automatic import AutoWords
    from manyhands.planner.jobs import of_plan

    cluster = plan.cluster
    _refuse_hosts(plan.auto[0], cluster.hosts)
    if cluster.device != "cpu":
        raise UsageError(
            f"--{plan.auto[0]} auto measures processors, and device {cluster.device} was asked for; name the "
            f"{plan.auto[0]}"
        )
    words = AutoWords(
        auto=tuple(plan.auto),
        strategy=plan.strategy,
        placement=plan.placement,
        workers=cluster.workers,
        threads=cluster.threads,
        servers=cluster.servers,
        optimizer=spec.split(plan.train.optimizer)[0] if plan.train.optimizer else None,
    )
    chosen = _choose(of_plan(plan), words)
    most = None if "workers" in plan.auto else cluster.most_workers
    cluster = msgspec.structs.replace(
        cluster, workers=chosen.workers, threads=chosen.threads, servers=chosen.servers, most_workers=most
    )
    plan = msgspec.structs.replace(plan, strategy=chosen.strategy, cluster=cluster, auto=[])
    plan.check()
    return plan, chosen


def settle_launch(options: argparse.Namespace, words: list[str], name: str) -> "Chosen | None":
    """The same for a script: what `launch` has left open is put into its options."""
    said = {"strategy": options.strategy, "workers": options.workers, "threads": options.threads}
    auto = tuple(word for word, value in said.items() if value == AUTO)
    if not auto:
        return None
    from manyhands import strategies
    from manyhands.planner.automatic import AutoWords
    from manyhands.planner.jobs import of_script

    _refuse_hosts(auto[0], options.hosts)
    asked = AutoWords(
        auto=auto,
        strategy=strategies.DEFAULT if "strategy" in auto else options.strategy,
        placement=options.placement,
        workers=2 if options.workers in (None, AUTO) else options.workers[0],
        threads=None if options.threads == AUTO else options.threads,
        servers=options.servers or 0,
    )
    chosen = _choose(of_script(words, name), asked)
    options.strategy, options.threads, options.servers = chosen.strategy, chosen.threads, chosen.servers
    if "workers" in auto:
        options.workers = (chosen.workers, chosen.workers)
    return chosen


def held_against(chosen: "Chosen | None", out: Path) -> str:
    """How a run that has ended well went beside what was predicted; nothing where nothing was."""
    if chosen is None:
        return ""
    from manyhands.planner import automatic

    summary = read_summary(out)
    return automatic.held_against(chosen, out, summary) if summary else ""


def _choose(job: "ProbedJob", words: "AutoWords") -> "Chosen":
    from manyhands.planner import automatic

    with measuring() as report:
        chosen = automatic.choose(
            job,
            words,
            report,
            on_measure=lambda why: say(f"auto      this host is measured with {job.name}, since {why}"),
        )
    say(chosen.why())
    for note in chosen.measured.probe.notes:
        say(f"note: {note}")
    return chosen


def refuse_auto(options: argparse.Namespace, why: str) -> None:
    """Where nothing can be chosen any more."""
    for word in ("strategy", "workers", "threads"):
        if getattr(options, word) == AUTO:
            raise UsageError(f"--{word} auto: {why}; name the {word}, or leave it out")


def _refuse_hosts(word: str, hosts: str | None) -> None:
    if hosts is not None:
        raise UsageError(
            f"--{word} auto measures before the other hosts of --hosts {hosts} have come; see what `manyhands plan "
            f"--cluster` advises, and name the {word}"
        )
