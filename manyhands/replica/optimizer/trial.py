"""Whether an optimizer may be divided, found by trying it on toys against itself.

A copy of the optimizer, with small tensors in the place of the user's parameters, makes some steps as plain PyTorch
makes them: all parameters in one call. A second copy makes the same steps as `Updates` would: by a twin, one tensor at
a time. If both end alike and nothing but the state of each tensor has changed, tensors may be divided among workers. If
it makes no difference either where tensors are cut, spans may be cut anywhere. Gradients of many sizes, and tensors
that have none, show what depends on a norm or on a count. Whatever is in doubt is not divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from manyhands.replica.optimizer.modes import has_modes
from manyhands.replica.optimizer.toys import Toys, described, uncopyable
from manyhands.replica.optimizer.twins import bare_step, optimizers_in, settings_of, twin

_SCALES = (1.0, 1e-4, 1e3, 1.0)  # of the gradients, step by step
_LARGE = 1 << 13  # elements of a toy that is cut: some optimizers treat small tensors otherwise
_UNEVEN = 1  # the step in which every second toy has no gradient
_HALF_ZERO = 3  # the step in which half of each gradient is zero
_USED_UP = 1e6  # what the memory of a gradient holds after its step
_CLOSE = 1e-3  # of the largest update; a norm over other elements changes it by far more


class Grain(Enum):
    """How finely the work of an optimizer may be divided."""

    ELEMENTS = "elements"
    """Anywhere: each element is updated by itself."""
    TENSORS = "tensors"
    """Between tensors: each is updated by itself."""
    WHOLE = "whole"
    """Not at all: it sees all parameters and gradients in one call, or keeps something for all of them."""


class Call(Enum):
    """How a step is called."""

    GRADIENT = "gradient"
    """`loss.backward(); optimizer.step()`"""
    CLOSURE = "closure"
    """`optimizer.step(closure)`, which computes the loss and the gradients as often as it likes."""
    BOTH = "gradient and closure"
    """`loss.backward(); optimizer.step(closure)`"""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What an optimizer can do."""

    grain: Grain
    call: Call = Call.GRADIENT
    reason: str = ""
    """Why it is not divided."""
    own_numbers: frozenset[str] = frozenset()
    """Settings of its groups that it changes itself."""
    draws: Literal["", "torch", "elsewhere"] = ""
    """Where it draws random numbers."""


def try_out(optimizer: Any) -> Abilities:
    """Try an optimizer on toys; it stays as it is, and so do the random numbers to come."""
    if reason := uncopyable(optimizer):
        return Abilities(grain=Grain.WHOLE, reason=reason)
    for call in Call:
        try:
            found = _abilities(optimizer, call)
            if call is not Call.CLOSURE or not _works(lambda: _looks_before(optimizer)):
                return found
        except Exception:  # it wants to be called in another way, or another shape: any error says so
            continue
    return Abilities(grain=Grain.WHOLE, reason="its step fails on small tensors, where we try it")


def _abilities(optimizer: Any, call: Call) -> Abilities:
    toys = Toys(optimizer)
    held, settings = described(toys.copy), toys.settings()
    _run_together(toys, call)
    own = _changed(settings, toys.settings())
    draws = _draws(optimizer, call, toys)
    if call is not Call.GRADIENT:
        reason = "it evaluates the loss several times in a step"
    elif len(list(optimizers_in(optimizer))) > 1:
        reason = "it is made of several optimizers"
    elif has_modes(optimizer):
        reason = "it has a mode for training and one for evaluation"
    elif own:
        reason = f"it keeps numbers for all parameters of a group ({', '.join(sorted(own))})"
    elif draws:
        reason = "it draws random numbers"
    elif described(toys.copy) != held:
        reason = "it keeps numbers for all parameters together"
    elif not any(bool(toy.update.any()) for toy in toys.chosen):
        reason = "it changed nothing when it was tried on small tensors"
    elif not _works(lambda: _is_same(toys, _run_apart(Toys(optimizer)))):
        reason = "its update of one parameter depends on the others"
    else:
        may_be_cut = _keeps_vectors(toys) and _works(lambda: _may_be_cut(optimizer))
        return Abilities(grain=Grain.ELEMENTS if may_be_cut else Grain.TENSORS)
    return Abilities(grain=Grain.WHOLE, call=call, reason=reason, own_numbers=own, draws=draws)


def _looks_before(optimizer: Any) -> bool:
    """Whether it makes a difference to a step with a closure that there is a gradient when it begins: then it wants
    one, as SAM does. Only a gradient that depends on the parameters shows it."""
    ends = []
    for is_first in (True, False):
        toys = Toys(optimizer)

        def closure(toys: Toys = toys) -> Tensor:
            for number, toy in enumerate(toys.chosen):
                toy.tensor.grad = toy.gradient(0, number, 1.0) + toy.tensor.detach()
            return torch.tensor(1.0)

        if is_first:
            closure()
        toys.copy.step(closure)
        ends.append(toys.values())
    return not _equal(*ends)


def _draws(optimizer: Any, call: Call, first: Toys) -> Literal["", "torch", "elsewhere"]:
    """Where it draws random numbers: then two runs differ. Other threads may draw meanwhile, so we leave PyTorch's own
    generator alone as long as the runs are the same."""
    random = torch.get_rng_state()

    def run(seed: int | None = None) -> list[Tensor]:
        toys = Toys(optimizer)
        if seed is not None:
            torch.manual_seed(seed)
        _run_together(toys, call)
        return toys.values()

    if _equal(first.values(), run()):
        return ""
    is_torch = _equal(run(1), run(1))
    torch.set_rng_state(random)
    return "torch" if is_torch else "elsewhere"


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(one, other) or bool(one.isnan().any()) for one, other in zip(some, others, strict=True)
    )


def _works(trial: Callable[[], bool]) -> bool:
    """Whether a trial succeeds; an optimizer that wants other shapes raises whatever it likes."""
    try:
        return trial()
    except Exception:
        return False


def _changed(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> frozenset[str]:
    """The names of settings that are no longer what they were."""
    return frozenset(
        name
        for was, now in zip(before, after, strict=True)
        for name in was.keys() | now.keys()
        if was.get(name) != now.get(name)
    )


def _run_together(toys: Toys, call: Call, *, uneven: bool = True) -> None:
    """As plain PyTorch does, with a step without any gradient at the end, which must change nothing."""

    def fill(gradients: Sequence[Tensor | None]) -> None:
        for toy, gradient in zip(toys.chosen, gradients, strict=True):
            toy.tensor.grad = None if gradient is None else gradient.clone()

    calls = 0
    for step in range(len(_SCALES)):
        gradients = _gradients(toys, step, uneven=uneven)

        def closure(gradients: Sequence[Tensor | None] = gradients) -> Tensor:
            nonlocal calls
            calls += 1
            fill(gradients)
            return torch.tensor(1.0)

        fill([None] * len(gradients) if call is Call.CLOSURE else gradients)
        if call is Call.GRADIENT:
            toys.copy.step()
        else:
            toys.copy.step(closure)
    if call is Call.CLOSURE and not calls:
        raise ValueError("it takes a closure, and does not call it")
    if call is Call.GRADIENT:
        fill([None] * len(toys.chosen))
        toys.copy.step()


def _run_apart(toys: Toys) -> list[Tensor]:
    """As `Updates` does it with whole tensors."""
    tensors = [toy.first.clone() for toy in toys.chosen]
    pieces = [(toy.group, tensor) for toy, tensor in zip(toys.chosen, tensors, strict=True)]
    _run_twin(toys, pieces, lambda step: _gradients(toys, step, uneven=True))
    return tensors


def _may_be_cut(optimizer: Any) -> bool:
    """Whether it makes no difference that what lies side by side is one tensor, and is cut anywhere."""
    toys = Toys(optimizer, _LARGE)
    _run_together(toys, Call.GRADIENT, uneven=False)
    groups = sorted({toy.group for toy in toys.chosen})
    members = {group: [n for n, toy in enumerate(toys.chosen) if toy.group == group] for group in groups}

    def cut(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        found = []
        for group in groups:
            vector = torch.cat([one.flatten() for n in members[group] if (one := tensors[n]) is not None])
            at = len(vector) // 3
            found += [vector[:at].clone(), vector[at:].clone()]
        return found

    pieces = cut([toy.first for toy in toys.chosen])
    owners = [group for group in groups for _ in range(2)]
    _run_twin(
        Toys(optimizer, _LARGE),
        list(zip(owners, pieces, strict=True)),
        lambda step: cut(_gradients(toys, step, uneven=False)),
    )
    wanted = cut([toy.tensor.detach() for toy in toys.chosen])
    first = cut([toy.first for toy in toys.chosen])
    return all(map(_is_close, pieces, wanted, first))


def _run_twin(
    toys: Toys, pieces: Sequence[tuple[int, Tensor]], gradients: Callable[[int], Sequence[Tensor | None]]
) -> None:
    """Steps of a twin on pieces, each with the number of its group, one after the other."""
    trial = twin(toys.copy)
    step_of = bare_step(trial)
    for step in range(len(_SCALES)):
        for (group, piece), gradient in reversed(list(zip(pieces, gradients(step), strict=True))):
            if gradient is not None and piece.numel():
                piece.grad = gradient
                trial.param_groups = [{**settings_of(toys.copy.param_groups[group]), "params": [piece]}]
                with torch.no_grad():
                    step_of(trial)
                gradient.fill_(_USED_UP)


def _gradients(toys: Toys, step: int, *, uneven: bool) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for number, toy in enumerate(toys.chosen):
        gradient = toy.gradient(step, number, _SCALES[step])
        if step == _HALF_ZERO:
            gradient.view(-1)[: gradient.numel() // 2] = 0.0
        found.append(None if uneven and step == _UNEVEN and number % 2 else gradient)
    return found


def _keeps_vectors(toys: Toys) -> bool:
    """Whether all its state is vectors as long as the parameter, and numbers in tensors."""
    return all(
        isinstance(value, Tensor)
        and (value.ndim == 0 or (value.shape == toy.first.shape and value.dtype == toy.first.dtype))
        for toy in toys.chosen
        for value in toys.copy.state.get(toy.tensor, {}).values()
    )


def _is_same(toys: Toys, apart: Sequence[Tensor]) -> bool:
    return all(
        _is_close(tensor, toy.tensor.detach(), toy.first)
        for tensor, toy in zip(apart, toys.chosen, strict=True)
    )


def _is_close(got: Tensor, wanted: Tensor, first: Tensor) -> bool:
    """Whether the difference is that of rounding, and not of another update."""
    if not wanted.numel():
        return True
    rounding = 16 * torch.finfo(first.dtype).eps * float(torch.maximum(wanted.abs(), first.abs()).max())
    limit = _CLOSE * float((wanted - first).abs().max()) + rounding
    return bool((got - wanted).abs().max() <= limit)
