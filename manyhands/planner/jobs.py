"""What can be probed: a declared job, or a script; and by what its measurements are known again."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from manyhands import placement as placements
from manyhands import strategies
from manyhands.job.plan import Cluster, Plan
from manyhands.planner.measure import ProbedJob
from manyhands.planner.splits import Split

_EPOCHS = 10**6
"""More than a probe can make: it ends the job when it has seen enough."""


def of_plan(plan: Plan) -> ProbedJob:
    """The job that a plan declares, with its batch and its kind of optimizer; how it is distributed is varied."""
    plan, _ = msgspec.structs.replace(
        plan, strategy=strategies.DEFAULT, placement=placements.DEFAULT
    ).on_fair_terms()
    train = msgspec.structs.replace(plan.train, epochs=_EPOCHS, steps=None, save_every="never")

    def command(split: Split, strategy: str) -> list[str]:
        cluster = Cluster(workers=split.processes, threads=split.threads, device=plan.cluster.device)
        probed = msgspec.structs.replace(plan, strategy=strategy, cluster=cluster, train=train)
        return ["-m", "manyhands.job.declared", probed.encode().decode()]

    optimizer = (plan.train.optimizer or "").partition(":")[0]
    known: Mapping[str, object] = {
        "model": plan.model,
        "data": plan.data,
        "batch": plan.batch,
        "optimizer": optimizer,
        "accumulate": plan.train.accumulate,
        "size": plan.train.size,
        "augment": plan.train.augment,
    }
    return ProbedJob(name=plan.model, command=command, known_by=known, epochs=plan.train.last_epoch)


def of_script(words: Sequence[str], name: str) -> ProbedJob:
    """A script with its arguments, or `-m` and a module. It runs up to its first steps in processes of its own."""

    def command(split: Split, strategy: str) -> list[str]:
        return [*words]

    return ProbedJob(
        name=name,
        command=command,
        known_by={"words": list(words), "script": _digest(words), "at": str(Path.cwd())},
    )


def _digest(words: Sequence[str]) -> str:
    """Of the script's text: one that was changed is another job."""
    try:
        return hashlib.sha256(Path(words[0]).read_bytes()).hexdigest()
    except OSError:  # a module
        return ""
