"""Habits of plain PyTorch that mean nothing, or something else, beside a session: each is refused or warned of once,
with the line to change.

All of it is looked for where it happens, so a step pays nothing for it: when an optimizer steps, when gradients are
clipped, at the first loss, and at the end.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.engine import outside_parameters
from manyhands.engine.engine import Engine
from manyhands.engine.first_steps import CountingBuffers
from manyhands.errors import UsageError
from manyhands.replica.optimizer.whole_path import stepping
from manyhands.replica.returned import loss_of

_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()  # by the optimizer's id
_updates: dict[
    int, Callable[[bool], bool]
] = {}  # of scripts whose own call of `step` makes the update; by its id
MEAN = 1  # as PyTorch keeps `reduction`
_MOST_NODES = 64  # of a loss's graph that are looked at


def watch(engine: Engine) -> None:
    """A session begins."""
    _install()
    _engines[id(engine.training.optimizer)] = engine
    if engine.has_entered:
        look(engine)


def update_at_step(engine: Engine, update: Callable[[bool], bool]) -> None:
    """From here on the script's own `optimizer.step()` calls this first, with whether it was given a closure; it
    returns whether it has made the update. No gradient is left then, so that the rest of `step` changes nothing."""
    _updates[id(engine.training.optimizer)] = update


def look(engine: Engine) -> None:
    """The model is where it trains."""
    engine.replica.part.first_loss = functools.partial(_look_at_first, engine)
    _look_for_hooks(engine)
    if engine.placed.mesh.feeds > 1:
        engine.first_steps.counting = CountingBuffers(engine.training.model, engine.placed.mesh.feeds)
    if _sums_over_workers(engine):
        engine.first_steps.loss = functools.partial(_look_again, engine)


def leave(engine: Engine) -> None:
    """A session ends: gradients that no step has used say that the script trains beside it."""
    _engines.pop(id(engine.training.optimizer), None)
    _updates.pop(id(engine.training.optimizer), None)
    if not _engines:
        outside_parameters.forget()
    if engine.has_entered and not engine.progress.steps and _has_gradients(engine.training.optimizer):
        engine.warn(
            "the session has made no step although the model has gradients; put session.step(batch) in the place of "
            "`loss.backward()` and `optimizer.step()`"
        )


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    # `clip_grad_norm_` and `clip_grad_value_` give these what they have found, whatever name a script has for them.
    for name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"):
        if hasattr(clip_grad, name):
            setattr(clip_grad, name, _noticing(getattr(clip_grad, name)))


# loss.backward(); optimizer.step()


def _before_step(optimizer: Optimizer, arguments: Any, settings: Any) -> None:
    """No optimizer of a session has gradients when the session calls its `step`, but for one that runs whole."""
    engine = _engines.get(id(optimizer))
    if engine is None:
        outside_parameters.refuse(optimizer, _params_of(optimizer))
        _refuse_beside(optimizer)
    if engine is None or engine.is_closed or id(optimizer) in stepping:
        return
    update = _updates.get(id(optimizer))
    if (update is not None and update(bool(arguments[1:] or settings))) or not _has_gradients(optimizer):
        return
    if engine.pending is not None:
        raise UsageError("optimizer.step() came after session.backward; call session.update() in its place")
    raise UsageError(
        "optimizer.step() was called beside the session, and the other workers would hear nothing of it; put "
        "session.step(batch) in the place of `loss.backward()` and `optimizer.step()`, or session.backward(batch) and "
        "session.update() where you need the gradients"
    )


def _refuse_beside(optimizer: Optimizer) -> None:
    """An optimizer that no session has steps what is in a session's model: each worker by its own samples."""
    if stepping:  # one that a session's own consists of
        return
    for engine in list(_engines.values()):
        if engine.world.size == 1 or not engine.has_entered:
            continue
        own = {id(param): name for name, param in engine.training.model.named_parameters()}
        for param in _params_of(optimizer):
            if id(param) in own and param.grad is not None:
                name = type(optimizer).__name__
                raise UsageError(
                    f"another optimizer ({name}) steps {own[id(param)]}, which is in the model of a session, by the "
                    "samples of one worker; give the session both: mh.session(model, [one, other], loss)"
                )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(param.grad is not None for param in _params_of(optimizer))


def _params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


# clip_grad_norm_ after the step


def _noticing(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def noticed(gradients: Any, *arguments: Any, **settings: Any) -> Any:
        if isinstance(gradients, list) and gradients in ([], [[]]):
            _nothing_to_clip()
        return real(gradients, *arguments, **settings)

    return noticed


def _nothing_to_clip() -> None:
    for engine in list(_engines.values()):
        if engine.progress.steps and engine.pending is None:
            engine.say_once(
                "there are no gradients to clip: session.step has used them, and param.grad is None; say "
                "mh.session(…, clip_norm=1.0), or clip between session.backward(batch) and session.update()"
            )


# The first loss


def _look_at_first(engine: Engine, returned: Any, samples: float) -> None:
    if any(param.grad is not None for param in engine.replica.parameters):
        raise UsageError(
            "the loss function has called backward() itself, and the session does so with what it returns; leave it out"
        )
    loss = loss_of(returned)
    if engine.world.size > 1 and isinstance(loss, Tensor):
        outside_parameters.note(loss, engine.training.model)
    if _sums_over_workers(engine):
        _look_at_loss(engine, returned, samples)


def _look_again(engine: Engine, returned: Any, samples: float) -> None:
    """At a loss of one of the next steps: what comes from the data may not show at once."""
    if engine.first_steps.loss and _warn_of_other_counts(engine, loss_of(returned), samples):
        engine.first_steps.loss = None


def _sums_over_workers(engine: Engine) -> bool:
    return engine.traits.pooled and engine.placed.mesh.feeds > 1


def _look_for_hooks(engine: Engine) -> None:
    """A hook sees the gradient of one worker's samples, as under DDP."""
    hooked = [name for name, param in engine.training.model.named_parameters() if param._backward_hooks]
    if hooked and _sums_over_workers(engine):
        engine.warn(
            f"parameter {hooked[0]!r} has a hook on its gradient (register_hook), which sees that of one worker's "
            "samples, divided by those of all; a mask is right, but a limit or a norm means something else than in one "
            "process: say clip_norm=, or change param.grad between session.backward(batch) and session.update()"
        )


# Buffers that the model writes to


def speak_of_buffers(engine: Engine, differed: Sequence[Tensor]) -> None:
    """These went by the samples of each worker alone, and all workers have had the same for them at a pause. What batch
    norm does so everyone knows."""
    if not differed or not _sums_over_workers(engine):
        return
    ids = {id(buffer) for buffer in differed}
    names = [
        f"{path}.{name}".removeprefix(".")
        for path, module in engine.training.model.named_modules()
        if not isinstance(module, _NormBase)
        for name, buffer in module.named_buffers(recurse=False)
        if id(buffer) in ids
    ]
    if names:
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        engine.say_once(
            f"the buffer {names[0]!r}{more} went by the samples of each worker alone, where one process has one that "
            "goes by all; at every pause they become their mean, and whole numbers those of worker 0"
        )


# A loss that is a sum, or a mean of more on one worker than on another


def _look_at_loss(engine: Engine, returned: Any, samples: float) -> None:
    """Gradients are weighted by samples, as those of means over samples."""
    workers, loss = engine.placed.mesh.feeds, loss_of(returned)
    if _warn_of_other_counts(engine, loss, samples):
        engine.first_steps.loss = None
    elif isinstance(loss, Tensor) and is_sum(loss, samples):
        engine.warn(
            f"the loss is a sum over the {samples:g} samples of a batch, so with {workers} workers a step is "
            f'{workers} times smaller than in one process; return the mean (reduction="mean", or divide by the number '
            f"of samples), or multiply the learning rate by {workers}"
        )


def _warn_of_other_counts(engine: Engine, loss: Any, samples: float) -> bool:
    found = isinstance(loss, Tensor) and what_counts(loss, samples)
    if found:
        kind, number = found
        engine.warn(
            f"the loss is {kind}, which is another number on each worker, and workers are combined by their samples "
            f"({samples:g} here), so a step is not that of one process; compute the loss yourself and say what counts: "
            f"session.backward(loss, samples={number}); session.update()"
        )
    return bool(found)


def what_counts(loss: Tensor, samples: float) -> tuple[str, str] | None:
    """What a loss is the mean over, and how a script says it, if that is not the same for each of so many samples: then
    one worker has more of it than another."""
    for node, _, divisors in _terms(loss.grad_fn):
        name = node.name()
        if name.startswith("NllLoss") and node._saved_reduction == MEAN and _is_uneven(node, samples):
            if node._saved_weight is not None:
                return "a mean by the weights of the targets (weight=)", "weight[targets].sum()"
            ignored = _signed(node._saved_ignore_index)
            kind = f"a mean over the targets that are not ignore_index={ignored}"
            return kind, f"(targets != {ignored}).sum()"
        if _kind(node, samples) == "sum" or _adds_up(node, samples):
            for divisor in divisors:
                if divisor % samples and not math.isclose(divisor, samples, rel_tol=1e-4):
                    return f"a sum divided by {divisor:g}, a tensor", "that number"
    return None


def _adds_up(node: Any, samples: float) -> bool:
    """Whether a term is a sum of equally many numbers of each sample, as of tokens."""
    return bool(node.name() == "SumBackward0" and math.prod(node._saved_self_sym_sizes) % samples == 0)


def _is_uneven(node: Any, samples: float) -> bool:
    """Whether what counts of the targets is another number for one sample than for another."""
    target, weight = node._saved_target, node._saved_weight
    counts = target != _signed(node._saved_ignore_index)
    if weight is not None:
        counts = counts * weight[torch.where(counts, target, 0)]
    if samples > 0 and counts.numel() % samples == 0:
        of_each = counts.reshape(int(samples), -1).sum(1, dtype=torch.float64)
        if math.isclose(float(of_each.min()), float(of_each.max()), rel_tol=1e-5):
            return False
    return not math.isclose(float(counts.sum(dtype=torch.float64)), samples, rel_tol=1e-4)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def is_sum(loss: Tensor, samples: float) -> bool:
    """Whether a loss is for certain a sum over so many samples: nothing in it is a mean, and no factor makes it one."""
    kinds = []
    for node, scale, divisors in _terms(loss.grad_fn):
        kind = _kind(node, samples)
        is_mean = divisors or abs(scale) * samples < 1.5
        kinds.append("mean" if kind == "sum" and is_mean else kind)
    return "sum" in kinds and "mean" not in kinds


def _terms(node: Any) -> Iterator[tuple[Any, float, list[float]]]:
    """What is added up to the loss, each with its factor, and with those divisors that come from the data."""
    left: list[tuple[Any, float, list[float]]] = [(node, 1.0, [])]
    for _ in range(_MOST_NODES):
        if not left:
            return
        node, scale, divisors = left.pop()
        if node is None:
            continue
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        inner = [one for one, _ in node.next_functions]
        if name in ("Add", "Sub", "Neg", "Clone", "ToCopy", "View", "Squeeze", "Reshape", "Alias"):
            left += [(one, scale, divisors) for one in inner]
        elif name in ("Mul", "Div"):
            found = [_factor(node, what) for what in ("_saved_other", "_saved_self")]
            factor, is_of_data = next((one for one in found if one is not None), (0.0, False))
            if factor:
                factor = factor if name == "Mul" else 1 / factor
                more = [1 / factor] if is_of_data and abs(factor) < 1 else []
                left += [(one, scale * factor, divisors + more) for one in inner]
        else:
            yield node, scale, divisors


def _factor(node: Any, name: str) -> tuple[float, bool] | None:
    """A number, and whether it is a tensor of the script's: then it comes from the data, as a count does."""
    value = getattr(node, name, None)
    if isinstance(value, (int, float)):
        return float(value), False
    if not isinstance(value, Tensor) or value.numel() != 1 or value.requires_grad or value.is_complex():
        return None
    return float(value), not _is_python_number(value)


def _is_python_number(value: Tensor) -> bool:
    """PyTorch keeps `2.0` as a tensor too; it makes no result of a wider type."""
    small = torch.ones((), dtype=torch.float16 if value.is_floating_point() else torch.uint8)
    return value.dtype != small.dtype and torch.result_type(small, value) == small.dtype


def _kind(node: Any, samples: float) -> str:
    name, reduction = node.name(), getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return {MEAN: "mean", 2: "sum"}.get(int(reduction), "")
    sizes: Sequence[int] = getattr(node, "_saved_self_sym_sizes", ())
    if name.startswith("MeanBackward"):
        return "mean"
    if name == "SumBackward0" and sizes and sizes[0] == samples:
        (inner, _), *_ = node.next_functions
        return "mean" if inner is not None and inner.name().startswith("MeanBackward") else "sum"
    return ""
