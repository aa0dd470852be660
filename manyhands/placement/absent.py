"""Tensors of a model whose values are not on this worker: they tell their shape, and no code reads them unawares.

Between steps a worker has a part of a model that a placement spreads. What a script reads there would be a piece, or
memory that is gone. So such a tensor has another class while it is absent, which PyTorch asks before every operation.
"""

import sys
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from manyhands import errors
from manyhands.errors import UsageError

# What the tensor itself can answer: its values are in none of it.
_OWN = {
    *(
        "requires_grad",
        "requires_grad_",
        "is_leaf",
        "grad",
        "grad_fn",
        "retains_grad",
        "output_nr",
        "_version",
    ),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
}
# What its shape and type answer.
_ABOUT = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "nbytes"),
    *("dtype", "itemsize", "element_size", "is_floating_point", "is_complex", "is_signed", "type_as"),
    *(
        "device",
        "layout",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_nested",
        "is_quantized",
        "get_device",
    ),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
}
# What would reach the memory behind a value that is here for one operation.
_MEMORY = {"data", "untyped_storage", "storage", "_typed_storage", "data_ptr", "share_memory_"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}

# Whose lines a person has not written.
_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    str(Path(torch.__file__).parents[1]),
    str(Path(errors.__file__).parent),
)


class Keeper(Protocol):
    """Who has the values: the part of a replica."""

    def value(self, lack: "Lack") -> Tensor:
        """All values of an absent tensor, of which gradients come back; or an error that says why not."""

    def refusal(self, lack: "Lack") -> str:
        """Why a script cannot have them here, and what to do."""


class Absent:
    """Mixed into the class of a tensor while its values are not here."""

    __slots__ = ()
    # A reference that keeps nothing alive: the garbage collector does not see that a tensor holds its class.
    lack: ClassVar[Callable[[], "Lack"]]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(function)
        if name in _OWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if name in _ABOUT:
            args, kwargs = tree_map_only(Absent, lambda each: type(each).lack().stand_in, (args, kwargs))
            return function(*args, **kwargs)
        lacks = dict.fromkeys(
            type(each).lack() for each in tree_leaves((args, kwargs)) if isinstance(each, Absent)
        )
        if _changes(name, args, kwargs):
            for lack in lacks:
                lack.refuse()
        values = {lack: lack.keeper.value(lack) for lack in lacks}
        args, kwargs = tree_map_only(Absent, lambda each: values[type(each).lack()], (args, kwargs))
        return function(*args, **kwargs)


class Lack:
    """One tensor that this worker has in part, for some moments, or not at all; made while it is whole."""

    def __init__(self, tensor: Tensor, name: str, keeper: Keeper) -> None:
        self.tensor, self.name, self.keeper = tensor, name, keeper
        # Of the same shape, in the memory of one element: whatever reads it reads no number.
        nothing = float("nan") if tensor.is_floating_point() else 0
        self.stand_in = torch.full((), nothing, dtype=tensor.dtype).expand(tensor.shape)
        self._present = type(tensor)
        self._absent: Any = type(self._present.__name__, (Absent, self._present), {"lack": weakref.ref(self)})

    def leave(self) -> None:
        self.tensor.__class__ = self._absent

    def come(self) -> None:
        self.tensor.__class__ = self._present

    def end(self) -> None:
        """A tensor like any other, which has memory of its own."""
        self.come()
        if self.tensor.data_ptr() == self.stand_in.data_ptr():
            self.tensor.data = torch.empty(self.stand_in.shape, dtype=self.stand_in.dtype)

    def refuse(self) -> None:
        raise UsageError(f"{_line()}{self.keeper.refusal(self)}")


def _name(function: Callable[..., Any]) -> str:
    """`size` for a method, `shape` for the reading of an attribute."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


def _changes(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation would write into an absent tensor, or get hold of its memory."""
    if name in _MEMORY or name in _HOOKS:
        return True
    if any(isinstance(each, Absent) for each in tree_leaves(kwargs.get("out"))):
        return True
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return in_place and bool(args) and any(isinstance(each, Absent) for each in tree_leaves(args[0]))


def _line() -> str:
    """`train.py, line 12: `, the line of the script that reads it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    name = frame.f_code.co_filename
    return "" if name.startswith((*_LIBRARIES, "<")) else f"{Path(name).name}, line {frame.f_lineno}: "
