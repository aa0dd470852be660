"""The declared training job: what `manyhands train` runs in every worker, built on public pieces alone."""

import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from manyhands import data, intervals, models, spec, telemetry
from manyhands import plan as plans
from manyhands.cluster.launchers import local
from manyhands.cluster.seat import own_seat
from manyhands.data.ledger import rounds
from manyhands.data.loading import gather
from manyhands.errors import UnknownName, UsageError
from manyhands.plan import Plan, Train
from manyhands.sessions import Session, host_count, worker_count

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "lbfgs": torch.optim.LBFGS,
}

LINE_SEARCHES = ("strong_wolfe",)  # of L-BFGS; without one it takes steps of the learning rate


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, over classes or over the next token."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Share:
    """Which part of its rate the optimizer gets in a step: warm-up from nothing (Goyal et al. 2017), and a cosine to
    nothing (Loshchilov & Hutter 2017), where asked for.

    A function of the step alone, unlike torch's own, which go on from the rate that they find. Its numbers are
    attributes, which `LambdaLR` saves: so a worker that comes later reckons with the same as the first ones.
    """

    def __init__(self, train: Train, total: int, steps_per_epoch: int) -> None:
        self.warm_up = round((train.warm_up or 0.0) * steps_per_epoch)
        self.is_cosine = train.schedule == "cosine"
        self.total = total

    def __call__(self, step: int) -> float:
        grown = min((step + 1) / self.warm_up, 1.0) if self.warm_up else 1.0
        done = min(step, self.total) / self.total
        return grown * ((1 + math.cos(math.pi * done)) / 2 if self.is_cosine else 1.0)


def run(plan: Plan, *, resume: bool = False, say: Callable[[str], None] | None = None) -> Session:
    """Train as the plan says; returns the finished session."""
    plan.check()
    asked, plan = plan, _with_everyone(plan)
    plan, why = plan.on_fair_terms(host_count())
    assert plan.train.optimizer is not None
    _check_device(plan.cluster.device)
    if plan.cluster.threads is not None:
        torch.set_num_threads(plan.cluster.threads)
    torch.manual_seed(plan.train.seed)
    samples, model = load(plan)
    model.to(plan.cluster.device)
    optimizer = make_optimizer(plan.train.optimizer, model)
    steps_per_epoch = _steps(plan, len(samples.train))
    length = plan.train.total_steps(steps_per_epoch)
    scheduler = scheduled(optimizer, Share(plan.train, length, steps_per_epoch))
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
        example=_example(plan, samples),
    )
    record = msgspec.structs.replace(plan, cluster=asked.cluster)
    session.plan = msgspec.to_builtins(record)
    if why and not session.takeovers and session.world.rank == 0:
        print(why, file=sys.stderr, flush=True)
    # Workers draw different dropout masks, unless they compute the same; a resumed run takes the saved states instead.
    torch.manual_seed((plan.train.seed + 1 + session.placing.feed) % 2**63)
    if resume and session.resume() is None:
        raise UsageError("there is no checkpoint to resume from in this run; start it without --resume")
    left = _steps_left(session, plan, len(samples.train))
    if resume and not left:
        session.warn("all of the plan is done already; ask for more with --epochs or --steps")
    if resume and scheduler is not None and not session.takeovers:  # else it is where the others have it
        # Resuming has put the numbers of the run that was interrupted into the first one.
        _go_on(scheduler, Share(plan.train, length, steps_per_epoch), length - left)
    total = session.steps + left
    telemetry.event(
        "start",
        total_steps=total,
        epochs=session.epoch - (-left // steps_per_epoch),
        workers=session.world.size,
        batch=plan.batch,
        model=plan.model,
        data=plan.data,
        strategy=plan.strategy,
        placement=plan.placement,
    )
    if session.out and session.world.rank == 0:
        record.write(session.out / "plan.json")
    while not plan.train.is_over(steps=session.steps, epochs=session.epoch):
        _epoch(session, plan, samples)
        result = session.evaluate(samples.test, measures={"accuracy": mh.accuracy})
        if say:
            quality = f"loss {result['loss']:.4f}  accuracy {result['accuracy'] * 100:.2f} %"
            speed = f"{session.summary()['samples_per_second']:,.0f} samples/s"
            say(f"step {session.steps}/{max(total, session.steps)}  {quality}  {speed}")
    if not session.measured:
        session.evaluate(samples.test, measures={"accuracy": mh.accuracy})
    return session


def load(plan: Plan) -> tuple[data.Data, nn.Module]:
    """The data, and a model that fits it."""
    samples = data.load(plan.data, seed=plan.train.seed, size=plan.train.size, augment=plan.train.augment)
    return samples, models.build(plan.model, samples.shape, samples.classes)


def _example(plan: Plan, samples: data.Data) -> Any:
    """A batch on which a placement may measure the model; where every worker has all of it, nobody reads one."""
    if plan.mesh().members == 1:
        return None
    return gather(samples.train, torch.arange(min(plan.batch, len(samples.train))), 0)


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda was asked for, but torch finds no GPU here; use --device cpu")
    if device == "cuda":
        torch.cuda.set_device(own_seat().rank % torch.cuda.device_count())


def _with_everyone(plan: Plan) -> Plan:
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
    """To the end of the plan, with its own workers; those who made the steps so far may have been others."""
    made = session.epoch * _steps(plan, length) + _steps(plan, session.position)
    return plan.train.steps_left(_steps(plan, length), steps=session.steps, of_epochs=made)


def _go_on(scheduler: LambdaLR, share: Share, made: int) -> None:
    """The plan may be longer than the one that was interrupted, or have other workers, who need `made` steps to come
    as far as this: the rate is where this plan has it."""
    scheduler.last_epoch = made
    scheduler.lr_lambdas = [share] * len(scheduler.base_lrs)
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = rate * share(made)


def _epoch(session: Session, plan: Plan, samples: data.Data) -> None:
    """Train to the end of the epoch, or to the last step of the plan in the middle of it."""
    device = plan.cluster.device
    train: Any = samples.train
    waiting: list[Any] = []
    batches: Any = session.batches(train, batch_size=plan.batch)
    for batch in batches:
        waiting.append(tuple(part.to(device) for part in batch) if device != "cpu" else batch)
        # The last ones of an epoch may be fewer, and must be used before the epoch ends.
        if len(waiting) < plan.train.accumulate and not session.feed.is_last:
            continue
        session.step(*waiting)
        waiting.clear()
        if plan.train.is_over(steps=session.steps) and session.position < len(train):
            batches.close()
            break


def scheduled(optimizer: Optimizer, share: Share) -> LambdaLR | None:
    """What changes the rate from step to step, if anything does."""
    return LambdaLR(optimizer, share) if share.warm_up or share.is_cosine else None


def make_optimizer(text: str, model: nn.Module) -> Optimizer:
    """`adamw:lr=0.001,weight_decay=0.1` → the optimizer over the model's parameters."""
    name, positional, settings = spec.split(text)
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    if positional:
        raise UsageError(f"optimizer {text!r}: write settings as key=value, not {positional[0]!r}")
    known = dict(inspect.signature(OPTIMIZERS[name]).parameters)
    del known["params"]
    values = {key: _setting(name, key, value, known) for key, value in settings.items()}
    try:
        return OPTIMIZERS[name](model.parameters(), **values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"optimizer {text!r}: {error}") from None


def _setting(name: str, key: str, value: str, known: Mapping[str, inspect.Parameter]) -> Any:
    """What an optimizer declares says little about types; its defaults say the rest."""
    if key not in known:
        raise UnknownName(f"setting of optimizer {name}", key, known)
    where = f"optimizer {name}:{key}"
    default = known[key].default
    if isinstance(default, tuple):
        values = spec.convert(value, tuple[float, ...], where)
        if len(values) != len(default):
            raise UsageError(
                f"{where}={value}: expected {len(default)} numbers, as in {'-'.join(map(str, default))}"
            )
        return values
    declared = known[key].annotation
    if declared == str | None:
        if value not in LINE_SEARCHES:
            raise UnknownName(f"{key} of optimizer {name}", value, LINE_SEARCHES)
        return value
    if declared in (int, int | None):
        return spec.convert(value, int, where)
    if isinstance(default, bool) or default is None:
        return spec.convert(value, bool, where)
    return spec.convert(value, float, where)


def main(arguments: list[str]) -> None:
    """`python -m manyhands.job PLAN [--resume]`, as the launcher starts it; the plan itself, not a file."""
    run(plans.decode(arguments[0]), resume="--resume" in arguments).finish()


if __name__ == "__main__":
    main(sys.argv[1:])
