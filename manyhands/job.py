"""The declared training job: what `manyhands train` runs in every worker, built on the public pieces alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import manyhands as mh
from manyhands import data, models, spec, telemetry
from manyhands.data.ledger import Ledger
from manyhands.errors import UnknownName, UsageError
from manyhands.plan import Plan
from manyhands.sessions import Session

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}

# What trains each model without a search: plain nets without batch norm need a smaller rate, language models Adam.
DEFAULT_OPTIMIZER = "sgd:lr=0.05,momentum=0.9"
OPTIMIZER_OF = {
    "alexnet": "sgd:lr=0.01,momentum=0.9",
    "vgg16": "sgd:lr=0.01,momentum=0.9",
    "vgg19": "sgd:lr=0.01,momentum=0.9",
    "lstm": "adamw:lr=0.002",
    "transformer": "adamw:lr=0.001",
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, over classes or over the next token."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def run(plan: Plan, *, resume: bool = False, on_epoch: Callable[[str], None] | None = None) -> Session:
    """Train as the plan says; returns the finished session."""
    plan.check()
    torch.manual_seed(plan.train.seed)
    samples = data.load(plan.data, seed=plan.train.seed, size=plan.train.size, augment=plan.train.augment)
    model = models.build(plan.model, samples.shape, samples.classes).to(plan.cluster.device)
    optimizer = make_optimizer(plan.train.optimizer or optimizer_for(plan.model), model)
    steps_per_epoch = Ledger(len(samples.train), seed=0).steps(plan.train.batch, plan.cluster.workers)
    updates_per_epoch = -(-steps_per_epoch // plan.train.accumulate)
    total = plan.train.epochs * updates_per_epoch
    if plan.train.steps is not None:
        total = min(total, plan.train.steps)
    scheduler = None
    if plan.train.schedule == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    session = mh.session(
        model,
        optimizer,
        loss,
        scheduler=scheduler,
        clip_norm=plan.train.clip_norm,
        seed=plan.train.seed,
        strategy=plan.strategy,
    )
    telemetry.event(
        "start",
        total_steps=total,
        epochs=-(-total // updates_per_epoch),
        workers=session.world.size,
        batch=plan.train.batch,
        model=plan.model,
        data=plan.data,
        strategy=plan.strategy,
    )
    if resume and session.resume() is None:
        raise UsageError("there is no checkpoint to resume from in this run; start it without --resume")
    while session.steps < total:
        _epoch(session, plan, samples, total)
        result = session.evaluate(samples.test, measures={"accuracy": mh.accuracy})
        if on_epoch:
            on_epoch(
                f"step {session.steps}/{total}  loss {result['loss']:.4f}  accuracy {result['accuracy'] * 100:.2f} %  "
                f"{session.summary()['samples_per_second']:,.0f} samples/s"
            )
        if plan.train.save and session.out:
            session.save()
    if not session.measured:
        session.evaluate(samples.test, measures={"accuracy": mh.accuracy})
    return session


def _epoch(session: Session, plan: Plan, samples: data.Data, total: int) -> None:
    device = plan.cluster.device
    waiting: list[Any] = []
    batches = session.batches(samples.train, batch_size=plan.train.batch)
    for batch in batches:
        waiting.append(tuple(part.to(device) for part in batch) if device != "cpu" else batch)
        if len(waiting) == plan.train.accumulate:
            session.step(*waiting)
            waiting.clear()
            if session.steps >= total:
                batches.close()
                break
    if waiting:
        session.step(*waiting)


def optimizer_for(model: str) -> str:
    return OPTIMIZER_OF.get(spec.split(model)[0], DEFAULT_OPTIMIZER)


def make_optimizer(text: str, model: nn.Module) -> Optimizer:
    """`adamw:lr=0.001,weight_decay=0.1` → the optimizer over the model's parameters."""
    name, _, settings = spec.split(text)
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    values = {key: spec.number_or_flag(value, f"{name}:{key}") for key, value in settings.items()}
    try:
        return OPTIMIZERS[name](model.parameters(), **values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer {text!r}: {error}") from None


def main(arguments: list[str]) -> None:
    """`python -m manyhands.job PLAN.json [--resume]`, as the launcher starts it."""
    plan = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Plan)
    run(plan, resume="--resume" in arguments).close()


if __name__ == "__main__":
    main(sys.argv[1:])
