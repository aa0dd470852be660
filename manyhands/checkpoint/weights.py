"""A model's weights alone, as one plain safetensors file that any tool can read."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from manyhands.checkpoint import tensor_file
from manyhands.checkpoint.disk import (
    REAL_DISK,
    Disk,
    ensure_directory,
    partial_of,
    reason,
    remove_leftovers,
    replace_file,
)
from manyhands.errors import CheckpointError


def save_weights(path: Path, tensors: Mapping[str, torch.Tensor], *, disk: Disk = REAL_DISK) -> None:
    """Write tensors to one file; a reader finds the old one or the new one, whole."""
    chunks = tensor_file.encode(tensors)
    try:
        ensure_directory(disk, path.parent)
        remove_leftovers(disk, path.parent, re.compile(re.escape(path.name)))
        replace_file(disk, path, chunks)
    except OSError as error:
        with contextlib.suppress(OSError):
            disk.remove(partial_of(path))
        raise CheckpointError(f"the weights could not be saved as {path}: {reason(error)}") from error
