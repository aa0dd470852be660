"""Parallel branches on different workers: each computes some, and their channels are joined."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from manyhands.placement.model_parallel import MemberGroup
from manyhands.placement.tensor.crossing import Copy, Gather


class _Only:
    """Says which branches run here, until it is removed."""

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self._module, self._all = module, module.only
        module.only = names

    def remove(self) -> None:
        self._module.only = self._all


def share_branches(module: Any, members: MemberGroup) -> tuple[set[int], set[int], list[Any]]:
    """Branches that follow each other go to the same worker: the tensors of its own, those of the others, and hooks."""
    limits = list[int]()
    weights = [sum(p.numel() for p in module.get_submodule(name).parameters()) for name in module.only]
    start, stop = fair_ranges(weights, members.comm.size)[members.comm.rank]
    own = _ids(module, module.only[start:stop])
    others = _ids(module, (*module.only[:start], *module.only[stop:]))

    def copy_in(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (Copy.apply(args[0], members.comm),) if args[0].requires_grad else args  # type: ignore[no-untyped-call]

    def join_out(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not limits:  # how many channels the others have is asked once
            widths = [
                int(row[0]) for row in members.groups.tensor_parallel.exchange([float(output.shape[1])])
            ]
            limits.extend(itertools.accumulate(widths, initial=0))
        whole: Tensor = Gather.apply(output, 1, limits, members.comm)  # type: ignore[no-untyped-call]
        return whole

    hooks = [
        _Only(module, module.only[start:stop]),
        module.register_forward_pre_hook(copy_in),
        module.register_forward_hook(join_out),
    ]
    return own, others, hooks


def _ids(module: nn.Module, names: Sequence[str]) -> set[int]:
    branches = [module.get_submodule(name) for name in names]
    return {id(tensor) for branch in branches for tensor in (*branch.parameters(), *branch.buffers())}


def fair_ranges(weights: Sequence[int], ways: int) -> list[tuple[int, int]]:
    """Ranges that follow each other, none of them empty, whose heaviest is as light as can be."""
    best: list[int] = []
    least = sum(weights) + 1
    for cuts in itertools.combinations(range(1, len(weights)), ways - 1):
        limits = [0, *cuts, len(weights)]
        heaviest = max(sum(weights[start:stop]) for start, stop in itertools.pairwise(limits))
        if heaviest < least:
            best, least = limits, heaviest
    return list(itertools.pairwise(best))
