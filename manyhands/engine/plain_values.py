"""Plain values, tensors and arrays as bytes that travel between workers: nothing is unpickled."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy
import torch
from safetensors.torch import load, save
from torch import Tensor

from manyhands.errors import UsageError

_TENSOR, _TUPLE, _ARRAY = 1, 2, 3  # what the wire format has no words of its own for
_PLAIN = (bool, int, float, str, bytes, type(None))


def encode(value: Any) -> bytes:
    """Plain values, tensors and arrays as bytes."""
    return msgspec.msgpack.encode(_plain(value))


def decode(blob: bytes) -> Any:
    """The inverse of `encode`."""
    return msgspec.msgpack.decode(blob, ext_hook=_found)


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        return msgspec.msgpack.Ext(_TENSOR, save({"": dense.cpu().contiguous()}))
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return msgspec.msgpack.Ext(_ARRAY, save({"": torch.from_numpy(numpy.ascontiguousarray(value))}))
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_plain(item) for item in value]))
    if isinstance(value, list):
        return [_plain(item) for item in value]
    raise UsageError(
        f"a {type(value).__name__} cannot travel between workers; give tensors, arrays, numbers, strings, and lists, "
        "tuples or dicts of them"
    )


def _found(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(msgspec.msgpack.decode(data, ext_hook=_found))
    tensor = load(bytes(data))[""]
    return tensor.numpy() if code == _ARRAY else tensor
