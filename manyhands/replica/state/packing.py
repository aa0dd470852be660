"""What an optimizer knows besides vectors (numbers, odd-shaped tensors), as bytes without pickle."""

from collections.abc import Mapping
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

States = dict[str, dict[str, Any]]  # by parameter and name: None for what a vector holds


class NotStates(Exception):
    """What no optimizer's state was packed into; or a state that cannot be packed."""


def pack(known: Mapping[str, Mapping[str, Any]]) -> bytes:
    """By parameter and name, as `Updates.export` gives it."""
    numbers: States = {}
    tensors: dict[str, Tensor] = {}
    try:
        for param, values in known.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{param}/{name}"] = value.clone().contiguous()  # neighbours may share one
                    value = "tensor"
                numbers.setdefault(param, {})[name] = value
        return msgspec.msgpack.encode([numbers, save(tensors) if tensors else b""])
    except (TypeError, ValueError, OverflowError, RuntimeError, SafetensorError) as error:
        raise NotStates(str(error)) from None


def unpack(content: bytes) -> States:
    try:
        numbers, blob = msgspec.msgpack.decode(content, type=tuple[dict[str, dict[str, Any]], bytes])
        tensors = load(blob) if blob else {}
        return {
            param: {
                name: tensors[f"{param}/{name}"] if value == "tensor" else value
                for name, value in values.items()
            }
            for param, values in numbers.items()
        }
    except (msgspec.DecodeError, SafetensorError, KeyError, ValueError) as error:
        raise NotStates(str(error)) from None
