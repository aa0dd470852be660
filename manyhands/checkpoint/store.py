"""Saving and loading checkpoints such that a crash at any byte leaves one that loads.

A checkpoint is a directory that is prepared under another name, synced, read back and only then renamed; the
pointer moves after that, and what is no longer needed goes last. One process at a time saves into a
directory; others may load from it.
"""

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint import manifest, record_file, shelf, tensor_file
from manyhands.checkpoint.disk import (
    REAL_DISK,
    Disk,
    discard,
    ensure_directory,
    partial_of,
    reason,
    remove_leftovers,
    remove_tree,
    replace_file,
)
from manyhands.errors import CheckpointError, UsageError

TENSORS = "tensors.safetensors"
RECORD = "record.json"

Contents = tuple[dict[str, torch.Tensor], dict[str, Any]]


def save(
    directory: Path,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
    keep: int = 3,
    disk: Disk = REAL_DISK,
) -> Path:
    """Save the checkpoint of a step and return its place; afterwards the `keep` newest remain.

    When this returns, the checkpoint survives a power cut. When it raises or the process dies, those that
    were there before still load. Saving a step again replaces its checkpoint.
    """
    if step < 0 or keep < 1:
        raise UsageError(f"cannot save step {step} and keep {keep} checkpoints: steps start at 0, keep at 1")
    files = {TENSORS: tensor_file.encode(tensors), RECORD: [record_file.encode(record)]}
    place = shelf.place_of(directory, step)
    try:
        ensure_directory(disk, directory)
        remove_leftovers(disk, directory, shelf.OURS)
        _prepare(disk, place, step, files)
        _put_in_place(disk, place)
        replace_file(disk, directory / shelf.POINTER, [f"{place.name}\n".encode()])
    except (OSError, CheckpointError) as error:
        # What was prepared may fill the disk; if it cannot be removed either, the next save will try again.
        with contextlib.suppress(OSError):
            remove_tree(disk, partial_of(place))
        why = reason(error) if isinstance(error, OSError) else error
        raise CheckpointError(
            f"step {step} could not be saved in {directory}: {why}; the checkpoints before it are unharmed"
        ) from error
    try:
        _tidy(disk, directory, place, keep)
    except OSError as error:
        warnings.warn(
            f"step {step} is saved, but old ones in {directory} could not be removed: {reason(error)}",
            stacklevel=2,
        )
    return place


def load(path: Path) -> Contents:
    """The tensors and the record of one checkpoint, or of the newest in a directory that is whole.

    A damaged newest checkpoint is reported as a warning and the one before it is used.
    """
    if shelf.NAME.fullmatch(path.name) or (path / manifest.MANIFEST).exists():
        try:
            return _read(path)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {path} cannot be used: {error}") from error
    damaged: list[str] = []
    for place in shelf.newest_first(path):
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


def _prepare(disk: Disk, place: Path, step: int, files: Mapping[str, Iterable[bytes]]) -> None:
    """Write a whole checkpoint beside its place, and make sure that it is on the disk and can be read."""
    partial = partial_of(place)
    disk.make_directory(partial)
    marks = {}
    for name, chunks in files.items():
        marking = manifest.Marking()
        disk.write(partial / name, marking.through(chunks))
        disk.sync(partial / name)
        marks[name] = marking.mark()
    written = manifest.Manifest(step=step, sequence=shelf.next_sequence(place.parent), files=marks)
    disk.write(partial / manifest.MANIFEST, [manifest.encode(written)])
    disk.sync(partial / manifest.MANIFEST)
    disk.sync(partial)
    _read(partial)


def _put_in_place(disk: Disk, place: Path) -> None:
    """Give the prepared checkpoint its name; an old one of the same name steps aside but still counts."""
    if place.exists():
        aside = shelf.replaced_place(place)
        if aside.exists():
            discard(disk, [aside])
        disk.rename(place, aside)
    disk.rename(partial_of(place), place)
    disk.sync(place.parent)


def _tidy(disk: Disk, directory: Path, saved: Path, keep: int) -> None:
    """Remove what is no longer needed, now that a newer checkpoint is safe."""
    unneeded = []
    for _, place in shelf.checkpoints(directory):
        original = shelf.original_place(place)
        if place != original and original.exists():
            unneeded.append(place)
        elif place != original:
            # An earlier save died between its two renames: the old checkpoint gets its name back.
            disk.rename(place, original)
    remaining = [place for place in shelf.newest_first(directory) if place not in unneeded]
    unneeded += [place for place in remaining[keep:] if place != saved]
    discard(disk, unneeded)


def _read(place: Path) -> Contents:
    try:
        manifest.verify(place, manifest.read(place))
        return tensor_file.decode(place / TENSORS), record_file.decode(place / RECORD)
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {reason(error)}") from error
