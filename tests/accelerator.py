"""A made-up accelerator, `fake:0`, for machines without a GPU: what is on it is kept apart from what is not.

Its tensors have their numbers in the memory of this process, and an operation on tensors of both devices is refused, as
a GPU refuses it. Torch asks for the devices of a process once, so `install` belongs at the beginning of one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake"
_MOVING = ("aten::_to_copy", "aten::copy_")
_CPU = torch.device("cpu")


class Remote(Tensor):
    """A tensor of the accelerator; `inner` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Remote":
        made: Remote = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What torch answers without an operation it would take from the shell.
        if function == Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].inner = args[1].inner
            return None
        if function == Tensor.data.__get__:  # type: ignore[attr-defined]
            return Remote(args[0].inner)
        if function is Tensor.data_ptr:
            return args[0].inner.data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """While it is entered, tensors can be made on the accelerator and moved to it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


def install() -> None:
    _setup_privateuseone_for_python_backend(NAME)  # type: ignore[no-untyped-call]


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the numbers themselves, with its results where torch would have them."""
    name, device = function._schema.name, kwargs.get("device")
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    remote = {id(one.inner): one for one in tensors if isinstance(one, Remote)}
    # A single number may be anywhere, as torch has it.
    if remote and name not in _MOVING and any(one.dim() and not isinstance(one, Remote) for one in tensors):
        raise RuntimeError(f"{name}: expected all tensors on one device, found {NAME}:0 and cpu")
    if device is not None:
        kwargs = {**kwargs, "device": _CPU}
        is_remote = torch.device(device).type == NAME
    else:
        is_remote = isinstance(args[0], Remote) if name == "aten::copy_" else bool(remote)
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))

    def placed(result: Any) -> Any:
        if not isinstance(result, Tensor) or not is_remote:
            return result
        return (
            remote[id(result)] if id(result) in remote else Remote(result)
        )  # what was changed in place is the same tensor

    return tree_map(placed, function(*inner_args, **inner_kwargs))


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Remote) else value
