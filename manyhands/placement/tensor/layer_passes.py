"""The passes of layers in slices: each takes whole values and gives whole values, whatever code calls it.

Where two layers are a chain, the first hands its slice on to the second, without an exchange between them. It does so
only while the module that has them both runs its own pass: to all other code (a loop over a `Sequential`, a slice of
it, a penalty on what a layer gives) each of the two is a layer like any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.errors import UsageError
from manyhands.placement.model_parallel import MemberGroup
from manyhands.placement.tensor.alterations import is_watched
from manyhands.placement.tensor.crossing import Copy, Gather, SumAcross, edges, split
from manyhands.placement.tensor.divided import DividedPass
from manyhands.placement.tensor.rules import SliceChain


class LayerPass(DividedPass):
    """While it `is_open`, the other end of a layer's chain is a slice."""

    def __init__(self, module: nn.Module, used: Sequence[Tensor], members: MemberGroup) -> None:
        self.is_open = False
        self._members = members
        super().__init__(module, used)


class ColumnsPass(LayerPass):
    """Some of the features that the layer gives."""

    def __init__(
        self, module: nn.Module, used: Sequence[Tensor], members: MemberGroup, features: int
    ) -> None:
        super().__init__(module, used, members)
        self._limits = edges(features, members.comm.size)
        self._from_end = 3 if isinstance(module, nn.Conv2d) else 1

    def compute(self, input: Tensor) -> Tensor:
        comm = self._members.comm
        inputs = Copy.apply(input, comm) if input.requires_grad else input  # type: ignore[no-untyped-call]
        output: Tensor = super().compute(inputs)
        if self.is_open:
            return output
        whole: Tensor = Gather.apply(output, output.dim() - self._from_end, self._limits, comm)  # type: ignore[no-untyped-call]
        return whole


class RowsPass(LayerPass):
    """What some of the features that a linear layer takes make of all that it gives."""

    def compute(self, input: Tensor) -> Tensor:
        comm = self._members.comm
        inputs = input if self.is_open else split(input, input.dim() - 1, comm)
        layer: Any = self.module
        total: Tensor = SumAcross.apply(F.linear(inputs, layer.weight), comm)  # type: ignore[no-untyped-call]
        return total if layer.bias is None else total + layer.bias.to(total.dtype)


class ChainPass(DividedPass):
    """The pass of a module with a chain: while it runs, the layers are open."""

    def __init__(
        self, chain: SliceChain, passes: Mapping[nn.Module, LayerPass], names: Mapping[nn.Module, str]
    ) -> None:
        self._links = [(link, passes.get(link)) for link in chain.links]
        self._open = [each for _, each in self._links if each]
        self._names = names
        self._children = list(chain.owner._modules.values())
        super().__init__(chain.owner)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        self._require_unaltered()
        is_chain = not any(each.is_lent for each in self._open)
        for each in self._open:
            each.is_open = is_chain
        try:
            return super().compute(*args, **kwargs)
        finally:
            for each in self._open:
                each.is_open = False

    def _require_unaltered(self) -> None:
        """What a script puts there later, perhaps on one worker, would see slices."""
        if list(self.module._modules.values()) != self._children:
            raise UsageError(
                f"the layers of {self._names[self.module] or 'the model'} are others than when the session began; "
                "change them before mh.session"
            )
        for link, own in self._links:
            if is_watched(link) or not (own.is_first if own else "forward" not in link.__dict__):
                raise altered(self._names[link])


def altered(name: str) -> UsageError:
    return UsageError(
        f"{name} got a hook or another forward after the session began, and tensor has divided what is around it, so "
        f"that code would see a part of the values; put it there before mh.session, or add whole={name} to --placement"
    )
