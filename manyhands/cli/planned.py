"""The plan of `manyhands train`: a spec file with flags on top, and refusals in the words that the person used."""

import argparse
import re
from typing import Any

import msgspec

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.errors import UsageError
from manyhands.job import plan as plans
from manyhands.job.known_names import refuse_unknown
from manyhands.job.plan import Plan
from manyhands.launching.run import check_workers, refuse_hosts, with_servers

CLUSTER = (
    "workers",
    "hosts",
    "most_workers",
    "servers",
    "threads",
    "device",
)  # flags that are words of [cluster]
TRAIN = (
    "batch",
    "optimizer",
    "weights",
    "head",
    "seed",
    "save_every",
    "keep",
)  # flags that are words of [train]

_SETTING = re.compile(r"(\w+)=(.+?): (.*)", re.DOTALL)


def planned(options: argparse.Namespace, rank_info: RankInfo) -> Plan:
    """The spec file, with what the flags say on top of it."""
    if options.spec is not None:
        plan = plans.read(options.spec)
    elif options.resume and (options.out / "plan.json").exists():
        plan = plans.read(options.out / "plan.json")
    else:
        plan = Plan()
    given = {key: value for key, value in vars(options).items() if value is not None}
    plan, given = _left_open(plan, given)
    if "workers" in given:
        given["workers"], given["most_workers"] = given["workers"]
    top = {key: given[key] for key in ("model", "data", "strategy", "placement", "codec") if key in given}
    cluster = {key: given[key] for key in CLUSTER if key in given}
    if rank_info.launcher != "alone":
        rank_info = with_servers(rank_info, cluster.get("servers", plan.cluster.servers or None))
        check_workers(given.get("workers"), rank_info)
        _refuse_auto(plan, rank_info)
        refuse_hosts(options.hosts, rank_info)
        cluster |= {
            "workers": rank_info.workers,
            "servers": rank_info.servers,
            "most_workers": None,
            "replace": None,
        }
        cluster["hosts"] = None
    train: dict[str, Any] = {key: given[key] for key in TRAIN if key in given}
    if options.epochs is not None or options.steps is not None:
        # Both say how long: either one given here replaces whatever the file says of both.
        train |= {"epochs": options.epochs, "steps": options.steps}
    return msgspec.structs.replace(
        plan,
        **top,
        cluster=msgspec.structs.replace(plan.cluster, **cluster),
        train=msgspec.structs.replace(plan.train, **train),
    )


def _refuse_auto(plan: Plan, rank_info: RankInfo) -> None:
    if plan.auto:
        raise UsageError(
            f"--{plan.auto[0]} auto is for runs of our own launcher, and {rank_info.launcher} has started this one, "
            f"with {rank_info.workers} workers; name the {plan.auto[0]}, as `manyhands plan` prints it"
        )


def _left_open(plan: Plan, given: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """What a flag leaves to the planner, or takes from it again, whatever the file says."""
    asked = [word for word in plans.AUTO_WORDS if given.get(word) == plans.AUTO]
    kept = [word for word in plan.auto if word not in given]
    auto = [word for word in plans.AUTO_WORDS if word in (*asked, *kept)]
    rest = {word: value for word, value in given.items() if word not in asked}
    return msgspec.structs.replace(plan, auto=auto), rest


def check(plan: Plan, options: argparse.Namespace) -> None:
    """Refuse before any process starts; the sentence names the flag or the file that is wrong."""
    try:
        plan.check()
        refuse_unknown(plan)
    except UsageError as error:
        error.args = (_as_given(str(error), options),)
        raise


def _as_given(refusal: str, options: argparse.Namespace) -> str:
    found = _SETTING.fullmatch(refusal)
    if (
        found
        and found[1] in (*CLUSTER, *TRAIN, "epochs", "steps")
        and getattr(options, found[1], None) is not None
    ):
        return f"--{found[1].replace('_', '-')} {found[2].strip(chr(39))}: {found[3]}"
    if options.spec is not None and _problem_of(plans.read(options.spec)) == refusal:
        return f"{options.spec}: {refusal}"
    return refusal


def _problem_of(plan: Plan) -> str:
    try:
        plan.check()
        refuse_unknown(plan)
    except UsageError as error:
        return str(error)
    return ""


def note_on(options: argparse.Namespace) -> str:
    """What a person should know of the spec file that was given."""
    if options.spec is None or plans.words_in(options.spec):
        return ""
    plan = Plan()
    return f"note: {options.spec} says nothing, so this is the default job, {plan.model} on {plan.data}"
