"""A step in two halves, for scripts that need the gradients in between.

    backward    the gradient of what this worker has; where workers step as one process, its mean over the samples of
                all workers. It is added to `param.grad`, which the script may read and change
    update      the strategy's step, which takes the gradients from there instead of computing them

After `backward` every worker has the same whole gradient, in memory of its own from when its script looks at it. So a
worker that dies between the two halves takes nothing with it: its samples are in the gradient, and count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import strategies
from manyhands.data.ledger import Ranges
from manyhands.engine.collecting import without_change
from manyhands.engine.engine import Engine
from manyhands.engine.feed import Feed
from manyhands.engine.handshake import BACKWARD, STEP, UPDATE, Handshake, disagreement
from manyhands.engine.held import HeldGradients, can_hold, found, is_looked_at
from manyhands.engine.joint_steps import joint_passes
from manyhands.engine.nonfinite import keep_buffers
from manyhands.engine.own_gradient import OwnGradient, computed, is_loss_itself, params_of
from manyhands.engine.step import (
    Answer,
    is_due,
    is_of_main,
    last_result,
    make,
    meet,
    result_of,
    run,
    take,
    together,
)
from manyhands.engine.step_input import NO_WORK, StepInput
from manyhands.errors import UsageError
from manyhands.replica.parameters import in_type
from manyhands.replica.share import Made


@dataclass
class Pending:
    """What is in the gradients that wait for an update."""

    samples: int = 0
    """This worker's."""
    counted: int = 0
    """Those of all workers, where they are in the ledger already."""
    batches: int = 0
    places: list[tuple[Feed, Ranges]] = field(default_factory=list)
    loss: float = 0.0
    """Summed over this worker's samples."""
    is_known: bool = True
    """Whether it is that of all of them."""
    held: HeldGradients | None = None
    """The gradients, where they are in the host's memory."""

    def keep(self) -> None:
        """The host's memory is about to go, or to be used again: they are this worker's own from here on."""
        if self.held is not None:
            self.held.take()

    @property
    def mean_loss(self) -> float | None:
        """None where only the script knows it."""
        if not self.is_known:
            return None
        return self.loss / self.samples if self.samples else math.nan

    def add(self, work: StepInput, loss: float, counted: int) -> None:
        self.is_known &= bool(work.parts) or not work.samples
        self.samples += work.samples
        self.counted += counted
        self.batches += work.batches
        self.places = [*self.places, *work.places]
        self.loss += loss


def backward(engine: Engine, given: Sequence[Any], samples: float | None = None, scaler: Any = None) -> Any:
    """Add gradients to `param.grad`; returns what the loss function returned.

    What is given are batches, or a loss that the script has computed itself, of so many samples; if nothing is, a
    backward pass of the script has left gradients.
    """
    _admit(engine)
    engine.has_graphs |= not given or is_loss_itself(given)
    progress = engine.progress
    samples = None if samples is None else float(samples)
    if not engine.siblings.is_in_loop and progress.outside < progress.outside_before:
        return last_result(engine)  # the other workers made this step before this one joined
    own: OwnGradient | None = None
    if not given:
        work, own = _found(engine, samples)
    else:
        work = _of_loss(engine, given[0], samples) if is_loss_itself(given) else take(engine, given)
    takeovers = progress.takeovers
    if engine.pending is None:
        keep_buffers(engine)
    pending = engine.pending = engine.pending or Pending()
    engine.accumulates |= pending.batches > 0
    before = pending.batches

    def attempt() -> None:
        nonlocal own
        # The gradient counted after all, or other workers have used these samples meanwhile.
        if pending.batches > before or progress.takeovers > takeovers:
            return
        engine.clock.start()
        handshake = _meet(engine, work) if engine.traits.synchronous else None
        own = computed(engine, work, own, handshake, scaler)
        if handshake:
            _gradient_of_all(engine, work, own, handshake, pending)
        else:
            _add([(param, grad) for param, grad in zip(params_of(engine), own.gradients, strict=True)])
            pending.add(work, own.loss, 0)

    together(engine, attempt, trains=True)
    if own is not None and work.parts:
        progress.last_result = result_of(engine, work, own.loss / work.samples)
    return last_result(engine)


def update(engine: Engine, answer: Answer, scaler: Any = None, loss: Tensor | float | None = None) -> bool:
    """Run the optimizer by the gradients as they are; returns whether it ran, which a scaler decides.

    A `loss` is that of a script which has computed it beside the session.
    """
    pending = engine.pending
    if pending is None:
        if is_due(engine):
            raise UsageError("session.update() found no gradient; call session.backward(batch) before it")
        return False
    is_due(engine)
    runs = _scaler_agrees(engine, scaler) if scaler is not None else True
    if not runs:
        pending.keep()
    if is_looked_at(engine):
        pending.held = None
    held = pending.held
    is_common = engine.traits.synchronous
    made = Made(
        gradients=found(engine) if runs and held is None else {},
        loss=pending.mean_loss if loss is None else _number(loss),
        is_weighted=is_common,
    )
    places = [] if is_common else pending.places
    work = StepInput([], pending.samples, pending.batches, places, made=made, counted=pending.counted)
    make(engine, work, answer, UPDATE if is_common else STEP)
    engine.pending = None
    if held is not None and not held.is_there:  # a death came between, and the step counts after all
        for param in params_of(engine):
            param.grad = None
    if scaler is not None:
        scaler.update()
    return runs


def _number(loss: Tensor | float) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def take_part(engine: Engine, handshake: Handshake) -> None:
    """A worker without data: the others compute a gradient, and this one keeps it as they do."""
    with joint_passes(engine, handshake, 0):
        _gradient_of_all(
            engine, NO_WORK, OwnGradient([None] * len(params_of(engine)), 0.0), handshake, Pending()
        )


def _admit(engine: Engine) -> None:
    if engine.pending is not None:
        return
    text, traits = engine.settings.strategy, engine.traits
    if not engine.placed.is_whole:
        raise UsageError(
            f"session.backward needs the whole model on every worker, and --placement {engine.settings.placement} "
            "divides it; call session.step(batch), and limit gradients by mh.session(clip_norm=…)"
        )
    if traits.one_piece or (traits.servers is not None and not traits.synchronous):
        raise UsageError(
            f"under {text} a step cannot be made in two halves, because the parameters change between them; call "
            f"session.step(batch), or choose --strategy {strategies.DEFAULT}"
        )
    if engine.replica.needs_closure:
        name = type(engine.training.optimizer).__name__
        raise UsageError(f"{name} evaluates the loss several times in a step; call session.step(batch)")


# What is given


def _of_loss(engine: Engine, loss: Tensor, samples: float | None) -> StepInput:
    """Which samples a loss is of: as the script says, or those of the batch that the loop has given it."""
    places, count = _turn(engine, samples)
    return StepInput([(loss, count)] if count else [], count, 1, places, weight=samples)


def _turn(engine: Engine, samples: float | None) -> tuple[list[tuple[Feed, Ranges]], int]:
    """The places of the samples that a loss is the mean of, and their number.

    Several losses of one batch have its places once: the first of them, in the session whose loop it is.
    """
    turn = engine.feeds.turn()
    if samples is None and turn is None:
        samples = engine.siblings.given
    if samples is None and turn is None:
        raise UsageError(
            "session.backward(loss) has to know how many samples the loss is the mean of; say "
            "session.backward(loss, samples=len(targets))"
        )
    places, found = turn or ([], 0)
    return places, found if samples is None else math.ceil(samples)


def _found(engine: Engine, samples: float | None) -> tuple[StepInput, "OwnGradient"]:
    """What a backward pass of the script has added to `param.grad`.

    What was there before is that of all workers, so its mean is what it was.
    """
    places, count = _turn(engine, samples)
    own = OwnGradient([param.grad for param in params_of(engine)], 0.0)
    for param in params_of(engine):
        param.grad = None
    return StepInput([], count, 1, places, weight=samples), own


def _add(gradients: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
    with torch.no_grad():
        for param, grad in gradients:
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad.add_(grad)


# That of all workers


def _meet(engine: Engine, work: StepInput) -> Handshake:
    """All workers say what they have. One that has joined between two halves takes part in the second one first."""
    while True:
        handshake = meet(engine, BACKWARD, work.counts)
        updating = handshake.wait().who(UPDATE)
        if not updating:
            return handshake
        if engine.pending and engine.pending.batches:
            raise disagreement(updating[0], UPDATE, engine.world.rank, BACKWARD)
        run(engine, NO_WORK, handshake)


def _gradient_of_all(
    engine: Engine, work: StepInput, own: OwnGradient, handshake: Handshake, pending: Pending
) -> None:
    """The mean over the samples of all workers, on all of them or on none."""
    answers = handshake.wait()
    progress, feeds = engine.progress, engine.feeds
    total = round(answers.total)
    weight = 1.0 if own.is_weighted else work.counts / answers.total if answers.total else 0.0
    is_held = can_hold(engine)

    def finish(loss: float) -> None:
        if is_held:
            _hold(engine, pending)
        else:
            _add(gradients)
        pending.add(work, loss, total)
        for feed, places in work.places:
            feed.audit.used += places
        engine.siblings.joint.keep()
        progress.commits += 1
        progress.samples += total
        if feeds.open:
            progress.position += total if is_of_main(engine, work) else 0
            feeds.note_step(answers.drawn, True, None, late=False)
            feeds.note_used()

    gradients: list[tuple[nn.Parameter, Tensor | None]] = []
    with without_change(engine, finish, own.loss):
        if is_held:
            engine.replica.gather(own.gradients, weight)
        else:
            gradients += _mean(engine, own.gradients, weight)


def _hold(engine: Engine, pending: Pending) -> None:
    """The sum is in the host's memory; to what the parameters have it is added at once."""
    if pending is engine.pending:
        adds = any(param.grad is not None for param in params_of(engine))
        pending.held = HeldGradients(engine.replica)
        # Another forward pass comes between, and compiled code asks for the class of every parameter.
        if adds or engine.accumulates:
            pending.held.take()


def _mean(
    engine: Engine, own: Sequence[Tensor | None], weight: float
) -> list[tuple[nn.Parameter, Tensor | None]]:
    """By parameter, the gradients of all workers, weighted; this worker's own are not touched."""
    params, world = params_of(engine), engine.world
    if world.size == 1:
        return list(zip(params, own, strict=True))
    replica = engine.replica
    length, places = replica.layout.length, replica.layout.places
    vector = replica.params.new_zeros(
        length + len(places)
    )  # and for each parameter on how many workers it has one
    engine.frozen.note([grad is not None for grad in own])
    with torch.no_grad():
        for index, (place, grad) in enumerate(zip(places, own, strict=True)):
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                torch.mul(dense.reshape(-1).to(vector.dtype), weight, out=vector[place.start : place.stop])
                vector[length + index] = 1.0
    comm = world.comm if vector.device.type == "cpu" else engine.comm
    comm.sum_(vector)
    has_one = (vector[length:] != 0).tolist()
    return [
        (param, in_type(vector[place.start : place.stop], param.dtype).view(place.shape) if count else None)
        for param, place, count in zip(params, places, has_one, strict=True)
    ]


# Scaled losses


def _scaler_agrees(engine: Engine, scaler: Any) -> bool:
    """Let a `torch.amp.GradScaler` undo its scale and decide whether the optimizer runs."""
    optimizer = engine.training.optimizer
    asked: list[bool] = []
    hidden = {name: vars(optimizer).pop(name) for name in _HIDDEN if name in vars(optimizer)}
    vars(optimizer)["step"] = lambda *arguments, **settings: asked.append(True)
    try:
        scaler.step(optimizer)
    finally:
        del vars(optimizer)["step"]
        vars(optimizer).update(hidden)
    return bool(asked)


_HIDDEN = ("step", "_step_supports_amp_scaling")  # a fused optimizer would undo the scale itself
