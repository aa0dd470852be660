"""Pickles of plain containers and arrays of bytes, read without unpickling: they import, call and size nothing.

Even an unpickler that allows arrays alone hands numpy a type and flags of the file's own making, and reserves memory
for a place of the file's choosing. Here a few instructions are understood, and an array is its bytes and its shape.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_BYTES = (b"u1", "u1")  # the type of all arrays, as Python 2 and 3 write it


@dataclass(eq=False)
class _Global:
    """Something of numpy that a pickle names."""

    name: str


class _PickledArray:
    """An array, or its type; what it is comes after it."""

    def __init__(self, is_type: bool) -> None:
        self.is_type = is_type
        self.content: Any = None


class _Stop(Exception):
    """The end of a pickle."""


def read(content: bytes) -> Any:
    """What `content` holds. Texts of Python 2 are bytes, and arrays are arrays of bytes."""
    reader = _Reader(content)
    try:
        while True:
            code = reader.take(1)
            if code not in _INSTRUCTIONS:
                raise ValueError(f"it has the instruction {code!r}")
            _INSTRUCTIONS[code](reader)
    except _Stop:
        return _value(reader.pop())


class _Reader:
    """A stack, as pickles want it."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0
        self._marks: list[int] = []
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, length: int) -> bytes:
        found = self._content[self._place : self._place + length]
        if length < 0 or len(found) != length:
            raise ValueError("it ends too early")
        self._place += length
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self._content.index(b"\n", self._place)
        return self.take(end + 1 - self._place)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items, self.stack[start:] = self.stack[start:], []
        return items

    def last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it adds to what is no list")
        target.extend(map(_value, items))

    def set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Of tuples in tuples the interpreter would compute a hash until its stack is used up.
            if type(target) is not dict or type(key) not in (bytes, str, int):
                raise ValueError("it adds to what is no dictionary of plain keys")
            target[key] = _value(value)

    def named(self, module: str, name: str) -> None:
        if (module, name) not in {("numpy", "ndarray"), ("numpy", "dtype")} and (
            module not in _ARRAY_MODULES or name != "_reconstruct"
        ):
            raise ValueError(f"it asks for {module}.{name}")
        self.push(_Global(name))

    def call(self) -> None:
        function, given = self.last(2)
        kind = function.name if isinstance(function, _Global) and type(given) is tuple and given else ""
        if kind not in ("_reconstruct", "dtype") or (kind == "dtype" and given[0] not in _BYTES):
            raise ValueError("it makes something else than arrays of bytes")
        self.push(_PickledArray(kind == "dtype"))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, _PickledArray) or type(state) is not tuple:
            raise ValueError("it changes what is no array")
        if not target.is_type:
            _, shape, kind, is_fortran, content = state
            if not isinstance(kind, _PickledArray) or not kind.is_type or type(content) is not bytes:
                raise ValueError("it has an array that is none of bytes")
            # Not a copy: a few bytes of a pickle can make another array of a long text that came before.
            target.content = np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


def _value(value: Any) -> Any:
    return value.content if isinstance(value, _PickledArray) else value


def _sized(form: str) -> Callable[[_Reader], None]:
    return lambda reader: reader.push(reader.take(reader.number(form)))


def _text(form: str) -> Callable[[_Reader], None]:
    return lambda reader: reader.push(reader.take(reader.number(form)).decode("utf-8", "surrogatepass"))


def _number(form: str) -> Callable[[_Reader], None]:
    return lambda reader: reader.push(reader.number(form))


def _tuple(count: int) -> Callable[[_Reader], None]:
    return lambda reader: reader.push(tuple(reader.last(count)))


def _keep(form: str) -> Callable[[_Reader], None]:
    def keep(reader: _Reader) -> None:
        reader.memo[reader.number(form)] = reader.stack[-1]

    return keep


def _kept(form: str) -> Callable[[_Reader], None]:
    return lambda reader: reader.push(reader.memo[reader.number(form)])


def _memoize(reader: _Reader) -> None:
    reader.memo[len(reader.memo)] = reader.stack[-1]


def _long(reader: _Reader) -> None:
    reader.push(int.from_bytes(reader.take(reader.number("<B")), "little", signed=True))


def _global_on_stack(reader: _Reader) -> None:
    module, name = reader.last(2)
    reader.named(str(module), str(name))


def _stop(reader: _Reader) -> None:
    raise _Stop


def _skip(length: int) -> Callable[[_Reader], None]:
    def skip(reader: _Reader) -> None:
        reader.take(length)

    return skip


_INSTRUCTIONS: dict[bytes, Callable[[_Reader], None]] = {
    b"\x80": _skip(1),  # the version
    b"\x95": _skip(8),  # the length of a frame
    b"}": lambda reader: reader.push({}),
    b"]": lambda reader: reader.push([]),
    b")": _tuple(0),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"(": lambda reader: reader.mark(),
    b"t": lambda reader: reader.push(tuple(reader.since_mark())),
    b"U": _sized("<B"),
    b"T": _sized("<i"),
    b"C": _sized("<B"),
    b"B": _sized("<I"),
    b"\x8e": _sized("<Q"),
    b"X": _text("<I"),
    b"\x8c": _text("<B"),
    b"\x8d": _text("<Q"),
    b"q": _keep("<B"),
    b"r": _keep("<I"),
    b"\x94": _memoize,
    b"h": _kept("<B"),
    b"j": _kept("<I"),
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"J": _number("<i"),
    b"G": _number(">d"),
    b"\x8a": _long,
    b"N": lambda reader: reader.push(None),
    b"\x88": lambda reader: reader.push(True),
    b"\x89": lambda reader: reader.push(False),
    b"a": lambda reader: reader.extend(reader.last(1)),
    b"e": lambda reader: reader.extend(reader.since_mark()),
    b"s": lambda reader: reader.set(reader.last(2)),
    b"u": lambda reader: reader.set(reader.since_mark()),
    b"c": lambda reader: reader.named(reader.line(), reader.line()),
    b"\x93": _global_on_stack,
    b"R": lambda reader: reader.call(),
    b"b": lambda reader: reader.build(),
    b".": _stop,
}
