"""Parallel branches on different workers: each computes some, and their channels are joined."""

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from manyhands.models.blocks import Branches
from manyhands.placement.model_parallel import MemberGroup, Sliced
from manyhands.placement.tensor.alterations import is_watched
from manyhands.placement.tensor.crossing import Copy, Gather
from manyhands.placement.tensor.divided import DividedPass
from manyhands.placement.tensor.layer_passes import altered


def share_branches(module: Branches, sliced: Sliced, names: Mapping[nn.Module, str]) -> None:
    """Branches that follow each other go to the same worker."""
    comm = sliced.members.comm
    weights = [sum(p.numel() for p in module.get_submodule(name).parameters()) for name in module.only]
    start, stop = fair_ranges(weights, comm.size)[comm.rank]
    own = _ids(module, module.only[start:stop])
    sliced.alone.update(own)
    sliced.elsewhere.update(_ids(module, (*module.only[:start], *module.only[stop:])))
    used = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) in own]
    sliced.passes.append(BranchesPass(module, used, module.only[start:stop], sliced.members, names))


class BranchesPass(DividedPass):
    """Some of the branches; how many channels the others have is asked once."""

    module: Branches

    def __init__(
        self,
        module: Branches,
        used: Sequence[Tensor],
        here: tuple[str, ...],
        members: MemberGroup,
        names: Mapping[nn.Module, str],
    ) -> None:
        self._here, self._members = here, members
        self._inside = [(each, names[each]) for each in module.modules() if each is not module]
        self._limits: list[int] = []
        super().__init__(module, used)

    def compute(self, images: Tensor) -> Tensor:
        for each, name in self._inside:
            if is_watched(each):
                raise altered(name)
        everything = self.module.only
        self.module.only = self._here
        try:
            own = Copy.apply(images, self._members.comm) if images.requires_grad else images  # type: ignore[no-untyped-call]
            output = super().compute(own)
        finally:
            self.module.only = everything
        if not self._limits:
            rows = self._members.groups.tensor_parallel.exchange([float(output.shape[1])])
            self._limits = list(itertools.accumulate((int(row[0]) for row in rows), initial=0))
        whole: Tensor = Gather.apply(output, 1, self._limits, self._members.comm)  # type: ignore[no-untyped-call]
        return whole


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
