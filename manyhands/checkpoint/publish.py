"""Putting a checkpoint's files on a disk such that a crash at any byte leaves a checkpoint that loads.

A checkpoint is a directory that is prepared under another name, synced, read back and only then renamed; the
pointer moves after that, and what is no longer needed goes last. One process at a time saves into a
directory; others may load from it. This file does not look at what the files hold: the process that writes in the
background has no torch.
"""

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path

from manyhands.checkpoint import index, manifest
from manyhands.checkpoint.disk import (
    REAL_DISK,
    Chunks,
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
WEIGHTS = "weights.safetensors"  # alone, in a folder that holds one version of a model
RECORD = "record.json"
KEEP = 3  # checkpoints that remain by default


def put(
    directory: Path, *, step: int, files: Mapping[str, Chunks], keep: int = KEEP, disk: Disk = REAL_DISK
) -> Path:
    """Make these files the checkpoint of a step and return its place; afterwards the `keep` newest remain.

    When this returns, the checkpoint survives a power cut. When it raises or the process dies, those that
    were there before still load. Saving a step again replaces its checkpoint.
    """
    check_numbers(step, keep)
    place = index.place_of(directory, step)
    try:
        ensure_directory(disk, directory)
        remove_leftovers(disk, directory, index.OURS)
        _prepare(disk, place, step, files)
        _put_in_place(disk, place)
        replace_file(disk, directory / index.POINTER, [f"{place.name}\n".encode()])
    except (OSError, CheckpointError) as error:
        # What was prepared may fill the disk; if it cannot be removed either, the next save will try again.
        with contextlib.suppress(OSError):
            remove_tree(disk, partial_of(place))
        raise failure(directory, step, error) from error
    try:
        _tidy(disk, directory, place, keep)
    except OSError as error:
        warnings.warn(
            f"step {step} is saved, but old ones in {directory} could not be removed: {reason(error)}",
            stacklevel=2,
        )
    return place


def check_numbers(step: int, keep: int) -> None:
    """Refuse what cannot be saved under any circumstances."""
    if step < 0 or keep < 1:
        raise UsageError(f"cannot save step {step} and keep {keep} checkpoints: steps start at 0, keep at 1")


def failure(directory: Path, step: int, error: Exception | str) -> CheckpointError:
    """Why a step is not on the disk, in one sentence."""
    why = reason(error) if isinstance(error, OSError) else error
    return CheckpointError(
        f"step {step} could not be saved in {directory}: {why}; the checkpoints before it are unharmed"
    )


def _prepare(disk: Disk, place: Path, step: int, files: Mapping[str, Chunks]) -> None:
    """Write a whole checkpoint beside its place, and make sure that it is on the disk and can be read."""
    partial = partial_of(place)
    disk.make_directory(partial)
    marks = {}
    for name, chunks in files.items():
        marking = manifest.Marking()
        disk.write(partial / name, marking.through(chunks))
        disk.sync(partial / name)
        marks[name] = marking.mark()
    written = manifest.Manifest(step=step, sequence=index.next_sequence(place.parent), files=marks)
    disk.write(partial / manifest.MANIFEST, [manifest.encode(written)])
    disk.sync(partial / manifest.MANIFEST)
    disk.sync(partial)
    manifest.verify(partial, manifest.read(partial))


def _put_in_place(disk: Disk, place: Path) -> None:
    """Give the prepared checkpoint its name; an old one of the same name steps aside but still counts."""
    if place.exists():
        aside = index.replaced_place(place)
        if aside.exists():
            discard(disk, [aside])
        disk.rename(place, aside)
    disk.rename(partial_of(place), place)
    disk.sync(place.parent)


def _tidy(disk: Disk, directory: Path, saved: Path, keep: int) -> None:
    """Remove what is no longer needed, now that a newer checkpoint is safe."""
    unneeded = []
    for _, place in index.checkpoints(directory):
        original = index.original_place(place)
        if place != original and original.exists():
            unneeded.append(place)
        elif place != original:
            # An earlier save died between its two renames: the old checkpoint gets its name back.
            disk.rename(place, original)
    remaining = [place for place in index.newest_first(directory) if place not in unneeded]
    unneeded += [place for place in remaining[keep:] if place != saved]
    discard(disk, unneeded)
