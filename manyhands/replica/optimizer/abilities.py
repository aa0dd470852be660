"""What an optimizer can do, and what state it keeps: known by its class, or found by trying it on toys."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import UsageError
from manyhands.replica.optimizer.descent import is_simple
from manyhands.replica.optimizer.trial import Abilities, Call, Grain, try_out
from manyhands.replica.optimizer.twins import ELEMENT_WISE, HOOKS, bare_step, settings_of, twin

# Known to update every tensor by itself, from its own gradient alone.
_TENSOR_WISE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)

_REFUSED = (RuntimeError, TypeError, ValueError)  # what an optimizer raises that cannot take a gradient

_found: WeakKeyDictionary[Any, Abilities] = WeakKeyDictionary()


def abilities_of(optimizer: Optimizer) -> Abilities:
    """Found once for every optimizer: what is built upon it must not change while it trains. Parameters of several
    types it updates whole: elements of one vector have one type."""
    known = _found.get(optimizer)
    if known is None:
        known = _by_class(type(optimizer)) or try_out(optimizer)
        if is_hooked(optimizer):
            known = replace(known, grain=Grain.WHOLE, reason="its hooks may look at all gradients")
        _found[optimizer] = known
    if known.grain is not Grain.WHOLE and len({param.dtype for param in trained_by(optimizer)}) > 1:
        return replace(known, grain=Grain.WHOLE, reason="its parameters are of several types")
    return known


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer has."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def type_names(params: Iterable[Tensor]) -> list[str]:
    """The types of parameters, each once."""
    return sorted({str(param.dtype).removeprefix("torch.") for param in params})


def _by_class(kind: type[Optimizer]) -> Abilities | None:
    """What is known without a trial."""
    if kind is torch.optim.LBFGS:
        reason = "it evaluates the loss several times in a step"
        return Abilities(grain=Grain.WHOLE, call=Call.CLOSURE, reason=reason)
    if kind in ELEMENT_WISE or kind in _TENSOR_WISE:
        return Abilities(grain=Grain.ELEMENTS if kind in ELEMENT_WISE else Grain.TENSORS)
    return None


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether functions of the user's are called with every step; a scheduler's only counts."""
    own = vars(optimizer).get("step")
    is_counted = own is None or hasattr(own, "_wrapped_by_lr_sched")
    return not is_counted or any(vars(optimizer).get(name) for name in HOOKS)


def is_element_wise(optimizer: Optimizer) -> bool:
    """Whether spans may be cut anywhere."""
    return abilities_of(optimizer).grain is Grain.ELEMENTS


def runs_whole(optimizer: Optimizer) -> bool:
    """Whether it cannot be divided: every worker runs the user's own, on all parameters of a replica of its own."""
    return abilities_of(optimizer).grain is Grain.WHOLE


def descends(optimizer: Optimizer) -> bool:
    """Whether all it does is done without it, in passes (`Descent`)."""
    is_known = type(optimizer) is torch.optim.SGD and is_element_wise(optimizer)
    return is_known and all(map(is_simple, optimizer.param_groups))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` must be able to evaluate the loss again (L-BFGS, SAM)."""
    return abilities_of(optimizer).call is not Call.GRADIENT


def vector_states(optimizer: Optimizer) -> list[str]:
    """Names of the states that have one element per parameter element, found by trying a step on a toy."""
    if runs_whole(optimizer):
        return []  # they are in the user's own
    return sorted(
        {
            name
            for toy, state in _trials(optimizer)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == toy.shape and value.dtype == toy.dtype
        }
    )


def number_states(optimizer: Optimizer) -> dict[str, torch.dtype]:
    """Names of the states that are one number in a tensor, with its type."""
    return {
        name: value.dtype
        for _, state in _trials(optimizer)
        for name, value in sorted(state.items())
        if isinstance(value, Tensor) and value.ndim == 0
    }


def _trials(optimizer: Optimizer) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """For each parameter group a toy, and its state after one step."""
    dense = torch.full((2, 2), 0.5)
    for group in optimizer.param_groups:
        for gradient in (dense, dense.to_sparse(1)):  # of those that take one kind only
            trial, toy = twin(optimizer), torch.ones(2, 2)
            try:
                _try(trial, group, toy, gradient)
            except _REFUSED:
                continue  # wants another shape or a closure: its state stays with the owner
            yield toy, trial.state[toy]
            break


def keeps_to_rows(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an update by the gradient of some rows leaves the others alone, as with momentum it does not: found by
    trying on a toy. Optimizers that take no such gradient are refused."""
    trial, toy = twin(optimizer), torch.ones(2, 1)
    group = {**group, "lr": 1.0} if "lr" in group else group  # a warm-up may begin with none
    try:
        _try(trial, group, toy, torch.tensor([[1.0], [0.0]]).to_sparse(1))
        before = toy[0].clone()
        _try(trial, group, toy, torch.tensor([[0.0], [1.0]]).to_sparse(1))
    except _REFUSED as error:
        raise UsageError(
            f"{type(optimizer).__name__} does not take the gradients that nn.Embedding(sparse=True) gives ({error}); "
            "use SGD or Adagrad without weight decay, SparseAdam, or sparse=False"
        ) from None
    return bool(before == toy[0])


def _try(trial: Optimizer, group: Mapping[str, Any], toy: Tensor, gradient: Tensor) -> None:
    """A step of a twin on one small tensor."""
    toy.grad = gradient
    trial.param_groups = [{**settings_of(group), "params": [toy]}]
    # Not checked by default either; torch warns where the program has not said so.
    with torch.no_grad(), torch.sparse.check_sparse_tensor_invariants(False):
        bare_step(trial)(trial)
