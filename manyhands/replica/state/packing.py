"""What an optimizer knows besides vectors (numbers, odd-shaped tensors), as bytes without pickle."""

from collections.abc import Mapping
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save

from manyhands.replica.state.transcoding import TENSOR, Values, put_together, take_apart

_Entries = dict[str, dict[str, tuple[str, Any]]]


class NotStates(Exception):
    """What no optimizer's state was packed into; or a state that cannot be packed."""


def pack(known: Mapping[str, Mapping[str, Any]]) -> bytes:
    """By parameter and name, as `Updates.export` gives it."""
    try:
        states, tensors = take_apart(known)
        return msgspec.msgpack.encode([states, save(tensors) if tensors else b""])
    except (TypeError, ValueError, OverflowError, RuntimeError, SafetensorError) as error:
        raise NotStates(str(error)) from None


def unpack(content: bytes) -> Values:
    """The inverse of `pack`."""
    try:
        states, blob = msgspec.msgpack.decode(content, type=tuple[_Entries, bytes])
        tensors = load(blob) if blob else {}
    except (msgspec.DecodeError, SafetensorError, KeyError, ValueError) as error:
        raise NotStates(str(error)) from None
    for param, entries in states.items():
        for name, (kind, _) in entries.items():
            if kind == TENSOR and f"{param}/{name}" not in tensors:
                raise NotStates(f"the tensor {param}/{name} is missing")
    return put_together(states, tensors)
