"""Layers in slices: each worker has some features of each, and its passes exchange what the next layer needs."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from manyhands.models.blocks import Branches
from manyhands.placement.model_parallel import MemberGroup, ModelParallelPart, Sliced, draw_alike
from manyhands.placement.process_groups import ProcessGroups
from manyhands.placement.tensor.alterations import Alterations
from manyhands.placement.tensor.branches import share_branches
from manyhands.placement.tensor.crossing import edges
from manyhands.placement.tensor.heads import share_heads
from manyhands.placement.tensor.layer_passes import ChainPass, ColumnsPass, LayerPass, RowsPass
from manyhands.placement.tensor.rules import COLUMNS, Rule, divide
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
    alterations = Alterations(model, groups)
    candidates = (module for module in modules if not tied & _ids(module))
    rules = divide(model, candidates, ways, given, alterations)
    draw_alike(groups)  # before any pass is replaced: a worker may be dead
    sliced = Sliced(MemberGroup(groups), alterations)
    names = {module: name for name, module in model.named_modules()}
    layers: dict[nn.Module, LayerPass] = {}
    for module, rule in rules.items():
        if isinstance(module, Branches):
            share_branches(module, sliced, names)
        elif isinstance(module, nn.MultiheadAttention):
            share_heads(module, ways, way, sliced)
        else:
            layers[module] = _slice(module, rule, ways, way, sliced)
    for chain in dict.fromkeys(rule.chain for rule in rules.values()):
        if chain:
            sliced.passes.append(ChainPass(chain, layers, names))
    if groups.world.rank == 0:
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


def _slice(module: nn.Module, rule: Rule, ways: int, way: int, sliced: Sliced) -> LayerPass:
    cut: list[Tensor] = []
    features = 0
    for name, param in module.named_parameters(recurse=False):
        if rule.kind == COLUMNS:
            dim = 1 if isinstance(module, nn.Embedding) else 0
        elif name == "bias":
            continue  # added after the sum, by every worker
        else:
            dim = 1
        features = param.shape[dim]
        limits = edges(features, ways)
        sliced.pieces[id(param)] = TensorSlice(
            shape=tuple(param.shape), cut=True, dim=dim, start=limits[way], stop=limits[way + 1]
        )
        cut.append(param)
    made: LayerPass
    if rule.kind == COLUMNS:
        made = ColumnsPass(module, cut, sliced.members, features)
    else:
        made = RowsPass(module, cut, sliced.members)
    sliced.passes.append(made)
    return made


class Slices(ModelParallelPart):
    """A slice of every layer that can be divided, and all of the others."""

    def __init__(self, model: nn.Module, loss: Loss, groups: ProcessGroups, sliced: Sliced) -> None:
        everything = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        super().__init__(model, loss, groups, held=everything - sliced.elsewhere, sliced=sliced)
