"""Saving and loading checkpoints: named tensors and a record of plain values."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint import index, manifest, record_file, tensor_file
from manyhands.checkpoint.disk import REAL_DISK, Disk, reason
from manyhands.checkpoint.publish import KEEP, RECORD, TENSORS, put
from manyhands.errors import CheckpointError

Contents = tuple[dict[str, torch.Tensor], dict[str, Any]]


def save(
    directory: Path,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
    keep: int = KEEP,
    disk: Disk = REAL_DISK,
) -> Path:
    """Save the checkpoint of a step, here and now, and return its place; afterwards the `keep` newest remain."""
    files = {TENSORS: tensor_file.encode(tensors), RECORD: [record_file.encode(record)]}
    return put(directory, step=step, files=files, keep=keep, disk=disk)


def load(path: Path) -> Contents:
    """The tensors and the record of one checkpoint, or of the newest in a directory that is whole.

    A damaged newest checkpoint is reported as a warning and the one before it is used.
    """
    if index.NAME.fullmatch(path.name) or (path / manifest.MANIFEST).exists():
        try:
            return _read(path)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {path} cannot be used: {error}") from error
    damaged: list[str] = []
    for place in index.newest_first(path):
        try:
            contents = _read(place)
        except CheckpointError as error:
            damaged.append(f"{place.name} cannot be used: {error}")
            continue
        if damaged:
            warnings.warn(f"in {path}, {'; '.join(damaged)}; using {place.name} instead", stacklevel=2)
        return contents
    tried = (
        "; ".join(damaged) or "there is none; a checkpoint is a directory called step-00000120 or the like"
    )
    raise CheckpointError(f"no checkpoint in {path} can be loaded: {tried}")


def _read(place: Path) -> Contents:
    try:
        manifest.verify(place, manifest.read(place), needed=(TENSORS, RECORD))
        return tensor_file.decode(place / TENSORS), record_file.decode(place / RECORD)
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {reason(error)}") from error
