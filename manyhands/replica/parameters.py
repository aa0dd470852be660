"""Which parameters of a model are trained, and what kind they are."""

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UsageError
from manyhands.replica.layout import Layout, Shape, lay_out
from manyhands.replica.optimizer.abilities import descends, is_element_wise, type_names

# Gradients made of factors are made faster for many rows at once. Measured for SGD in passes only: where a span's state
# is copied before its update (`UndoLog`), larger spans cost something as well.
_MATRIX_SPANS = 4


def trained(model: nn.Module, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
    """The optimizer's parameters in the model's order, with their names; tied ones count once."""
    wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = [(name, param) for name, param in model.named_parameters() if id(param) in wanted]
    if len(found) != len(wanted):
        raise UsageError(
            f"the optimizer has {len(wanted)} parameters and the model contains {len(found)} of them; "
            "make the optimizer from model.parameters()"
        )
    if not found:
        raise UsageError("the optimizer has no parameters; make it from model.parameters()")
    return [name for name, _ in found], [param for _, param in found]


def common_type(params: Sequence[Tensor]) -> tuple[torch.device, torch.dtype]:
    """The device of all of them, and the type of a vector in which each has a place: their own, or, where they are of
    several, one that holds the sum of any of their gradients."""
    devices = {param.device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(
            f"the trained parameters are on {len(devices)} devices ({names}), and a replica is one vector on one "
            "device: move the model before mh.session, as by model.to('cuda')"
        )
    types = {param.dtype for param in params}
    try:
        found = functools.reduce(torch.promote_types, types)
    except RuntimeError:
        raise UsageError(
            f"the trained parameters are of the types {', '.join(type_names(params))}, which have no type in common; "
            "leave those that get no gradient out of the optimizer"
        ) from None
    # Whole numbers, which get no gradient, may be longer than the type of those that do.
    is_long = max(one.itemsize for one in types) > found.itemsize
    return devices.pop(), torch.promote_types(found, torch.float64) if is_long else found


def in_type(values: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Gradients in the type of a vector, as those of a parameter have to be; a part of the vector if that is the same
    type, unless a `copy` is wanted."""
    own = values.real if values.is_complex() and not dtype.is_complex else values
    return own.to(dtype, copy=copy)


def sparse_ids(model: nn.Module) -> set[int]:
    """The ids of the parameters of which a step has gradients of some rows only."""
    tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse)
    return {id(table._parameters["weight"]) for table in tables if "weight" in table._parameters}


def lay_out_model(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    span_bytes: int,
    lanes: int,
    every: Callable[[str], int] = lambda name: 1,
    factored: Collection[int] = (),
) -> Layout:
    """Where the trained parameters lie in the flat vector: the same on everyone who has the same model.

    Of the matrices whose ids are in `factored`, those that would fill several spans are cut between rows.
    """
    names, params = trained(model, optimizer)
    return lay_out_params(
        names,
        params,
        optimizer,
        originals=params,
        sparse=sparse_ids(model),
        span_bytes=span_bytes,
        lanes=lanes,
        every=every,
        factored=factored,
    )


def lay_out_params(
    names: Sequence[str],
    params: Sequence[Tensor],
    optimizer: Optimizer,
    *,
    originals: Sequence[Tensor],
    sparse: set[int],
    span_bytes: int,
    lanes: int,
    every: Callable[[str], int] = lambda name: 1,
    factored: Collection[int] = (),
) -> Layout:
    """The same for some parameters; the optimizer knows the `originals` that they stand for."""
    _, dtype = common_type(params)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    whole = not is_element_wise(optimizer)
    shapes = [
        Shape(
            name=name,
            shape=tuple(p.shape),
            group=group_of[id(original)],
            whole=whole,
            rows=id(p) in sparse,
            factored=not whole and id(p) in factored and p.nbytes >= 2 * span_bytes,
            every=every(name),
        )
        for name, p, original in zip(names, params, originals, strict=True)
    ]
    return lay_out(
        shapes,
        span_elements=span_bytes // dtype.itemsize,
        lanes=lanes,
        matrix_spans=_MATRIX_SPANS if descends(optimizer) else 1,
    )
