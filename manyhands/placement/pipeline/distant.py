"""Values that another stage has: known by shape and type alone, so that the code between layers runs on every stage."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from manyhands.errors import UsageError

# What code may ask of a value that is not here: its shape, its type, and what follows from them.
QUESTIONS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "dim_order",
    "__len__",
}
QUESTIONS |= {
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "is_conj",
    "is_neg",
    "is_tensor",
}
QUESTIONS |= {
    "is_inference",
    "is_shared",
    "is_pinned",
    "element_size",
    "get_device",
    "result_type",
    "__hash__",
}
DATA = {"data", "T", "H", "mT", "mH", "real", "imag"}  # attributes that are values
WITHOUT_EFFECT = {"requires_grad_", "retain_grad", "register_hook"}

_questions: dict[Any, bool] = {}


class Look(Exception):
    """Code asks for the numbers in a value that is not here."""


class Distant(Tensor):
    """A value of another stage."""

    twin: Tensor  # on the meta device
    value: Tensor | None  # which has come meanwhile, where it could not take the place of this very object

    @staticmethod
    def like(twin: Tensor) -> "Distant":
        made: Distant = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Distant, twin.size(), strides=twin.stride(), dtype=twin.dtype, device=torch.device("cpu")
        )
        made.twin, made.value = twin, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = present((args, kwargs or {}))
        if not any(type(each) is Distant for each in tensors_in(args, kwargs)):
            return func(*args, **kwargs)
        if is_question(func):
            return answer(func, args, kwargs)
        raise UsageError(
            f"{name_of(func)} needs a value that another stage has; keep the code around it in one module, and end "
            "that module's stage after it, --placement pipeline:split=LAYER"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        return cls.__torch_function__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "a value of another stage"


def is_question(func: Any) -> bool:
    """Whether a call asks only for shapes and types."""
    found = _questions.get(func)
    if found is None:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            found = getattr(getattr(func, "__self__", None), "__name__", "") not in DATA
        else:
            found = name in QUESTIONS
        _questions[func] = found
    return found


def answer(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a function."""
    found: list[Tensor] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a module takes or gives."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def present(value: Any) -> Any:
    """With values that have come in the places of those that were absent."""
    return tree_map_only(Distant, lambda each: each if each.value is None else each.value, value)


def twin_of(tensor: Tensor) -> Tensor:
    """The shape and the type of a tensor, without its numbers."""
    if type(tensor) is Distant:
        return tensor.twin
    if tensor.layout != torch.strided:  # PyTorch computes no shapes with sparse ones
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def imagine(func: Any, args: Any, kwargs: dict[str, Any], twin: Callable[[Tensor], Tensor] = twin_of) -> Any:
    """What a call gives, by shape and type: tensors that it changes in place are themselves, the rest are absent."""
    twins: dict[int, Tensor] = {}
    originals: dict[int, Tensor] = {}

    def double(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = made = twin(tensor)
            originals[id(made)] = tensor
        return twins[id(tensor)]

    def result(tensor: Tensor) -> Tensor:
        if id(tensor) in originals:
            return originals[id(tensor)]
        return Distant.like(tensor if tensor.is_meta else twin_of(tensor))

    name = name_of(func)
    if name == "cpu" or name in WITHOUT_EFFECT:
        return args[0]
    given, named = tree_map_only(Tensor, double, (tuple(args), dict(kwargs)))
    if not twins or named.get("device") is not None:
        named["device"] = "meta"
    given = tuple(torch.device("meta") if _is_device(value, name) else value for value in given)
    try:
        with torch.no_grad():
            made = func(*given, **named)
    except Exception as error:
        raise Look(f"{name}: {' '.join(str(error).split())[:120]}") from error
    if made is not None and not tensors_of(made):
        raise Look(name)
    return tree_map_only(Tensor, result, made)


def _is_device(value: Any, name: str) -> bool:
    return isinstance(value, torch.device) or (name == "to" and isinstance(value, str))


class _Drawing(TorchDispatchMode):
    """Whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; none are drawn to find out."""
    if kwargs.get("generator") is not None:
        return True
    watch = _Drawing()
    try:
        with watch:
            imagine(func, args, kwargs)
    except Look:
        pass
    return watch.seen
