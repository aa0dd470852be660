"""A vector of so many elements and no values: what is done with it is written down as bytes read and written."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

ITEM_BYTES = 4  # float32

ONE_NUMBER = {
    "sum",
    "norm",
    "max",
    "min",
    "mean",
    "any",
    "all",
    "dot",
    "argmax",
    "argmin",
    "prod",
    "var",
    "std",
}
"""What gives one number, or one number for each of several."""

FREE = {
    "view",
    "reshape",
    "flatten",
    "detach",
    "contiguous",
    "squeeze",
    "unsqueeze",
    "requires_grad_",
    "narrow",
}
"""What moves nothing."""


class FlatVector:
    """Takes every operation of a tensor; a strategy that is new to the planner may use any of them."""

    dtype = device = None
    itemsize = ITEM_BYTES

    def __init__(self, touch: Callable[[float], None], length: int) -> None:
        self._touch = touch
        self._length = int(length)

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return self._length * ITEM_BYTES

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._length,)

    def numel(self) -> int:
        return self._length

    def __iter__(self) -> Iterator["FlatVector"]:
        return iter([self._made(1)] * min(self._length, 64))

    def __getitem__(self, key: Any) -> "FlatVector":
        if isinstance(key, slice):
            return self._made(len(range(*key.indices(self._length))))
        return self._made(len(key) if hasattr(key, "__len__") else 1)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._touch(2 * self[key].nbytes)

    def __float__(self) -> float:
        return 1.0

    def __int__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        return True

    def item(self) -> float:
        return 1.0

    def tolist(self) -> list[float]:
        return [1.0] * self._length

    def tensor_split(self, places: list[int]) -> list["FlatVector"]:
        edges = [0, *(min(place, self._length) for place in places), self._length]
        return [self._made(stop - start) for start, stop in itertools.pairwise(edges)]

    def __getattr__(self, name: str) -> Callable[..., "FlatVector"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: self._do(name, [*given, *named.values()])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        """`torch.lerp(vector, other, 0.5)` is `vector.lerp(other, 0.5)`."""
        everything = [*_flat(given), *_flat((named or {}).values())]
        first = next(each for each in everything if isinstance(each, cls))
        return first._do(function.__name__, [each for each in everything if each is not first])

    def _do(self, name: str, given: list[Any]) -> "FlatVector":
        if name in FREE:
            return self
        read = sum(each.nbytes for each in _flat(given) if isinstance(each, FlatVector))
        if name.startswith("new_"):
            size = given[0] if given and isinstance(given[0], int) else self._length
            self._touch(size * ITEM_BYTES)
            return self._made(size)
        is_copy = name in ("copy_", "zero_", "fill_")
        made = self if name.endswith("_") else self._made(1 if name in ONE_NUMBER else self._length)
        self._touch((0 if is_copy else self.nbytes) + read + made.nbytes)
        return made

    def _made(self, length: int) -> "FlatVector":
        return FlatVector(self._touch, length)


def _operator(name: str) -> Callable[..., FlatVector]:
    return lambda self, *given: self._do(name, list(given))  # type: ignore[no-any-return]


for _name in (
    *("add", "sub", "mul", "truediv", "pow", "neg", "abs", "matmul", "mod", "floordiv"),
    *("radd", "rsub", "rmul", "rtruediv", "rpow", "lt", "le", "gt", "ge", "and", "or", "invert"),
):
    setattr(FlatVector, f"__{_name}__", _operator(_name))
for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(FlatVector, f"__{_name}__", _operator(f"{_name}_"))


def _flat(given: Any) -> Iterator[Any]:
    for each in given:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each
