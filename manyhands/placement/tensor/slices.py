"""Layers in slices: each worker has some features of each, and hooks exchange what the next layer needs."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from manyhands.placement.model_parallel import MemberGroup, ModelParallelPart, Sliced, draw_alike
from manyhands.placement.process_groups import ProcessGroups
from manyhands.placement.tensor.branches import share_branches
from manyhands.placement.tensor.crossing import Copy, Gather, Split, SumAcross, edges
from manyhands.placement.tensor.heads import share_heads
from manyhands.placement.tensor.rules import BRANCHES, COLUMNS, Rule, divide
from manyhands.replica.part import Loss
from manyhands.replica.state.slice_of import TensorSlice


def slice_model(
    model: nn.Module,
    groups: ProcessGroups,
    modules: Iterable[nn.Module],
    given: Mapping[str, Sequence[str]],
) -> Sliced:
    """Divide the layers among the tensor-parallel group; parameters that several layers use stay whole."""
    ways, way = groups.mesh.ways, groups.position.way
    tied = _used_twice(model)
    rules = divide(model, (module for module in modules if not tied & _ids(module)), ways, given)
    draw_alike(groups)  # before any hook is on the model: a worker may be dead
    sliced = Sliced(MemberGroup(groups))
    for module, rule in rules.items():
        if rule.kind == BRANCHES:
            own, others, hooks = share_branches(module, sliced.members)
            sliced.alone.update(own)
            sliced.elsewhere.update(others)
            sliced.hooks.extend(hooks)
        elif isinstance(module, nn.MultiheadAttention):
            share_heads(module, ways, way, sliced)
        else:
            _slice(module, rule, ways, way, sliced)
    if groups.world.rank == 0:
        names = {module: name for name, module in model.named_modules()}
        told = [f"{names[module]} {rule.kind}" for module, rule in rules.items()]
        print(f"tensor: {ways} ways: {', '.join(told)}", file=sys.stderr, flush=True)
    return sliced


def _ids(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters()}


def _used_twice(model: nn.Module) -> set[int]:
    """The parameters that several modules have."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        own = {id(param) for param in module.parameters(recurse=False)}
        twice |= seen & own
        seen |= own
    return twice


def _slice(module: nn.Module, rule: Rule, ways: int, way: int, sliced: Sliced) -> None:
    for name, param in module.named_parameters(recurse=False):
        if rule.kind == COLUMNS:
            dim = 1 if isinstance(module, nn.Embedding) else 0
        elif name == "bias":
            continue  # added after the sum, by every worker
        else:
            dim = 1
        limits = edges(param.shape[dim], ways)
        sliced.pieces[id(param)] = TensorSlice(
            shape=tuple(param.shape), cut=True, dim=dim, start=limits[way], stop=limits[way + 1]
        )
    before, after = _crossings(module, rule, sliced.members)
    if before:
        sliced.hooks.append(module.register_forward_pre_hook(before))
    if after:
        sliced.hooks.append(module.register_forward_hook(after))


def _crossings(module: nn.Module, rule: Rule, members: MemberGroup) -> tuple[Any, Any]:
    """What happens before a layer and after it."""

    def copy_in(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (Copy.apply(args[0], members.comm), *args[1:]) if args[0].requires_grad else args  # type: ignore[no-untyped-call]

    def split_in(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (Split.apply(args[0], args[0].dim() - 1, members.comm), *args[1:])  # type: ignore[no-untyped-call]

    def gather_out(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        dim = 1 if isinstance(module, nn.Conv2d) else output.dim() - 1
        limits = edges(features, members.comm.size)
        whole: Tensor = Gather.apply(output, dim, limits, members.comm)  # type: ignore[no-untyped-call]
        return whole

    def sum_out(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        total: Tensor = SumAcross.apply(output, members.comm)  # type: ignore[no-untyped-call]
        bias = getattr(module, "bias", None)
        # Every worker has added the bias: all but one are taken away again.
        return total if bias is None else total - (members.comm.size - 1) * bias.detach()

    if rule.kind == COLUMNS:
        if isinstance(module, nn.Embedding):
            features = module.embedding_dim
        else:
            features = module.out_channels if isinstance(module, nn.Conv2d) else module.out_features  # type: ignore
        return copy_in, None if rule.open else gather_out
    return None if rule.open else split_in, sum_out


class Slices(ModelParallelPart):
    """A slice of every layer that can be divided, and all of the others."""

    def __init__(self, model: nn.Module, loss: Loss, groups: ProcessGroups, sliced: Sliced) -> None:
        everything = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        super().__init__(model, loss, groups, held=everything - sliced.elsewhere, sliced=sliced)
