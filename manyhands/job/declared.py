"""The declared training job: what `manyhands train` runs in every worker, built on public pieces alone."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from manyhands import data, models, telemetry
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.data.ledger import rounds
from manyhands.engine import intervals
from manyhands.engine.session import Session
from manyhands.engine.worker_process import host_count, worker_count
from manyhands.errors import UsageError
from manyhands.job import plan as plans
from manyhands.job.initial_weights import adopt
from manyhands.job.layer_watch import LayerWatch
from manyhands.job.optimizers import make_optimizer
from manyhands.job.plan import Plan
from manyhands.job.rate_schedule import RateSchedule, go_on, scheduled


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, over classes or over the next token."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def run(plan: Plan, *, resume: bool = False, say: Callable[[str], None] | None = None) -> Session:
    """Train as the plan says; returns the finished session."""
    plan.check()
    asked, plan = plan, _with_all_workers(plan)
    plan, why = plan.on_fair_terms(host_count())
    samples, session, scheduler = _begin(plan)
    record = msgspec.structs.replace(plan, cluster=asked.cluster)
    session.engine.plan = msgspec.to_builtins(record)
    is_late = (
        session.engine.progress.takeovers > 0
    )  # other workers have begun, and said all that there is to say
    if session.is_main and not is_late:
        for line in filter(None, (samples.note, why)):
            print(line, file=sys.stderr, flush=True)
    if resume and session.resume() is None:
        raise UsageError("there is no checkpoint to resume from in this run; start it without --resume")
    steps_per_epoch = _steps(plan, len(samples.train))
    left = _steps_left(session, plan, len(samples.train))
    if resume and not left:
        session.warn("all of the plan is done already; ask for more with --epochs or --steps")
    if resume and scheduler is not None and not is_late:
        # Resuming has put the numbers of the run that was interrupted into the first one.
        length = plan.train.total_steps(steps_per_epoch)
        go_on(scheduler, RateSchedule(plan.train, length, steps_per_epoch), length - left)
    total = session.steps + left
    _record_start(session, plan, total=total, epochs=session.epoch - (-left // steps_per_epoch))
    if session.out and session.is_main:
        record.write(session.out / "plan.json")
    _train(session, plan, samples, total, say)
    return session


def _begin(plan: Plan) -> tuple[data.Data, Session, LambdaLR | None]:
    """The data, and a session with the model and the optimizer that the plan names."""
    _check_device(plan.cluster.device)
    if plan.cluster.threads is not None:
        torch.set_num_threads(plan.cluster.threads)
    torch.manual_seed(plan.train.seed)
    samples, model = load(plan)
    if plan.train.weights is not None:
        adopt(model, Path(plan.train.weights), plan.train.head)
    model.to(plan.cluster.device)
    optimizer = make_optimizer(plan.train.optimizer or "", model)
    steps_per_epoch = _steps(plan, len(samples.train))
    length = plan.train.total_steps(steps_per_epoch)
    scheduler = scheduled(optimizer, RateSchedule(plan.train, length, steps_per_epoch))
    session = mh.session(
        model,
        optimizer,
        loss,
        scheduler=scheduler,
        clip_norm=plan.train.clip_norm,
        seed=plan.train.seed,
        save_every=plan.train.save_every if local.RUN_DIR in os.environ else intervals.NEVER,
        keep=plan.train.keep,
        strategy=plan.strategy,
        placement=plan.placement,
        codec=plan.codec,
    )
    return samples, session, scheduler


def _record_start(session: Session, plan: Plan, *, total: int, epochs: int) -> None:
    telemetry.event(
        "start",
        total_steps=total,
        epochs=epochs,
        workers=session.workers,
        batch=plan.batch,
        model=plan.model,
        data=plan.data,
        strategy=plan.strategy,
        placement=plan.placement,
    )


def _train(
    session: Session, plan: Plan, samples: data.Data, total: int, say: Callable[[str], None] | None
) -> None:
    """To the end of the plan, with an evaluation after every epoch."""
    while not plan.train.is_over(steps=session.pace, epochs=session.epoch):
        _epoch(session, plan, samples)
        result = session.evaluate(samples.test, measures=_measures(samples))
        if say:
            quality = f"loss {result['loss']:.4f}  accuracy {result['accuracy'] * 100:.2f} %"
            speed = f"{session.summary()['samples_per_second']:,.0f} samples/s"
            say(f"step {session.steps}/{max(total, session.steps)}  {quality}  {speed}")
    if not session.measured:
        session.evaluate(samples.test, measures=_measures(samples))


def _measures(samples: data.Data) -> dict[str, Any]:
    """Tokens are many and of one kind: only classes are counted one by one."""
    return {"classes": mh.per_class()} if samples.task == "classify" else {"accuracy": mh.accuracy}


def load(plan: Plan) -> tuple[data.Data, nn.Module]:
    """The data, and a model that fits it."""
    samples = data.load(plan.data, seed=plan.train.seed, size=plan.train.size, augment=plan.train.augment)
    return samples, models.build(plan.model, samples.shape, samples.classes)


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda was asked for, but torch finds no GPU here; use --device cpu")
    if device == "cuda":
        torch.cuda.set_device(own_rank_info().rank % torch.cuda.device_count())


def _with_all_workers(plan: Plan) -> Plan:
    """The plan with the workers of all hosts, where it names those of one; how many came is known only now."""
    if plan.cluster.hosts is None:
        return plan
    cluster = msgspec.structs.replace(plan.cluster, workers=worker_count(), most_workers=None)
    plan = msgspec.structs.replace(plan, cluster=cluster)
    plan.check()
    return plan


def _steps(plan: Plan, samples: int) -> int:
    """How many steps the workers of the plan need for so many samples."""
    return -(-rounds(samples, plan.batch * plan.mesh().feeds) // plan.train.accumulate)


def _steps_left(session: Session, plan: Plan, length: int) -> int:
    """To the end of the plan, with its own workers; other workers may have made the steps so far. Those that the plan
    limits are steps of the whole run, by its samples."""
    made = session.epoch * _steps(plan, length) + _steps(plan, session.position)
    return plan.train.steps_left(_steps(plan, length), steps=session.pace, of_epochs=made)


def _watch(session: Session, plan: Plan) -> LayerWatch | None:
    """One worker looks for all."""
    every = plan.train.watch_layers
    if every is None or not session.is_main or session.out is None:
        return None
    return LayerWatch(session.engine.training.model, loss, every)


def _epoch(session: Session, plan: Plan, samples: data.Data) -> None:
    """Train to the end of the epoch, or to the last step of the plan in the middle of it."""
    watch = _watch(session, plan)
    train: Any = samples.train
    waiting: list[Any] = []
    batches: Any = session.batches(train, batch_size=plan.batch)
    for batch in batches:
        waiting.append(batch)
        # The last ones of an epoch may be fewer, and must be used before the epoch ends.
        if len(waiting) < plan.train.accumulate and not session.engine.feed.is_last:
            continue
        session.step(*waiting)
        if watch is not None:
            watch.see(session.steps, session.epoch, waiting[-1])
        waiting.clear()
        if plan.train.is_over(steps=session.pace) and session.position < len(train):
            batches.close()
            break


def main(arguments: list[str]) -> None:
    """`python -m manyhands.job.declared PLAN [--resume]`, as the launcher starts it; the plan itself, not a file."""
    run(plans.decode(arguments[0]), resume="--resume" in arguments).finish()


if __name__ == "__main__":
    main(sys.argv[1:])
