"""Which parameters of a model are trained, and what kind they are."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UsageError


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


def one_type(params: Sequence[Tensor]) -> tuple[torch.device, torch.dtype]:
    kinds = {(param.device, param.dtype) for param in params}
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise UsageError(
            f"the trained parameters are of {len(kinds)} kinds ({names}); convert the model to one"
        )
    return kinds.pop()


def sparse_ids(model: nn.Module) -> set[int]:
    """The ids of the parameters that get gradients for some rows only."""
    return {
        id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    }
