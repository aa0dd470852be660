"""`torch.func` (vmap, grad, jvp, …) around a model in parts: what workers send each other must be plain tensors."""

import torch

from manyhands.errors import UsageError


def refuse_transforms(placement: str) -> None:
    """Called where a placement is about to compute with what it has divided."""
    if torch._C._are_functorch_transforms_active():
        raise UsageError(
            f"the model is called inside of torch.func (vmap, grad, jvp, …), and {placement} has divided it over "
            "workers, which cannot exchange what such a transform computes; leave --placement out, or use "
            "torch.autograd in the place of torch.func"
        )
