"""The record of a checkpoint: plain values as JSON, exactly as they will come back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import CheckpointError
from manyhands.foreign.regular import read_small

LARGEST_BYTES = 1 << 30


def encode(record: Mapping[str, Any]) -> bytes:
    """JSON text, with NaN and Infinity as Python writes them; refuses what would come back changed."""
    plain = dict(record)
    try:
        _refuse_unequal(plain, "record")
        return json.dumps(plain).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's record cannot be written as JSON: {error}") from error


def decode(path: Path) -> dict[str, Any]:
    """The record in a file."""
    try:
        value = json.loads(read_small(path, LARGEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}, not a record")
    return value


def _refuse_unequal(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{where} has the key {key!r}, a {type(key).__name__}: JSON has only string keys"
                )
            _refuse_unequal(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_unequal(item, f"{where}[{index}]")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which JSON cannot give back unchanged: "
            "use numbers, strings, lists, dicts or None, and pass tensors as tensors"
        )
