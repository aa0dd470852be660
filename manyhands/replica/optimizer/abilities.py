"""What an optimizer can do, and what state it keeps: found by its class, or by trying a step of a twin on a toy."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import UsageError
from manyhands.replica.optimizer.descent import is_simple

ELEMENT_WISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.SparseAdam,
)

_REFUSED = (RuntimeError, TypeError, ValueError)  # what an optimizer raises that cannot take a gradient

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # where torch keeps them


def is_element_wise(optimizer: Optimizer) -> bool:
    """Exactly one of the known classes: a subclass may do anything."""
    return type(optimizer) in ELEMENT_WISE


def descends(optimizer: Optimizer) -> bool:
    """Whether all it does is done without it, in passes (`Descent`)."""
    return type(optimizer) is torch.optim.SGD and all(map(is_simple, optimizer.param_groups))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` must be able to evaluate the loss again (L-BFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def twin(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with no parameters, no state and none of the hooks hung on the original."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler replaces it on the original, to see that it is called
    copy.__dict__.update(state=defaultdict(dict), param_groups=[])
    for name in HOOKS:
        if name in copy.__dict__:
            copy.__dict__[name] = type(copy.__dict__[name])()
    return copy


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """PyTorch wraps `step` of its own optimizers for profiling, hooks and the compiler; per span that is too much."""
    kind = type(optimizer)
    return inspect.unwrap(kind.step) if is_element_wise(optimizer) else kind.step


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def vector_states(optimizer: Optimizer) -> list[str]:
    """Names of the states that have one element per parameter element, found by trying a step on a toy."""
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
