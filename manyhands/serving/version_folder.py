"""A folder with one version of a model: weights, description, a recorded sample, and a manifest that vouches for them.

It is prepared under another name, synced, and renamed: a reader finds all of it or none.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from manyhands.checkpoint import manifest
from manyhands.checkpoint.disk import REAL_DISK, Chunks, ensure_directory, partial_of, reason, remove_tree
from manyhands.checkpoint.publish import RECORD, WEIGHTS
from manyhands.errors import CheckpointError, UsageError
from manyhands.serving.description import DESCRIPTION

SAMPLE = "sample.safetensors"
"""Held-out inputs and targets, on which a version shows that it is no worse than the one before it."""


def write(parent: Path, version: int, step: int, files: Mapping[str, Chunks]) -> Path:
    """Put these files at `parent/version`, which must not be there yet."""
    place = parent / str(version)
    if place.exists():
        raise UsageError(f"{place} is there already; a version never changes: choose another --version")
    partial, marks = partial_of(place), {}
    try:
        ensure_directory(REAL_DISK, parent)
        REAL_DISK.make_directory(partial)
        for name, chunks in files.items():
            marking = manifest.Marking()
            REAL_DISK.write(partial / name, marking.through(chunks))
            REAL_DISK.sync(partial / name)
            marks[name] = marking.mark()
        found = manifest.Manifest(step=step, sequence=version, files=marks)
        REAL_DISK.write(partial / manifest.MANIFEST, [manifest.encode(found)])
        REAL_DISK.sync(partial / manifest.MANIFEST)
        REAL_DISK.sync(partial)
        os.rename(partial, place)  # not `replace`: another export may have put one there meanwhile
        REAL_DISK.sync(parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove_tree(REAL_DISK, partial)
        raise CheckpointError(f"the version could not be written to {place}: {reason(error)}") from error
    return place


def next_version(parent: Path) -> int:
    """One more than the highest number there."""
    try:
        return 1 + max((int(path.name) for path in parent.iterdir() if is_version(path.name)), default=0)
    except OSError:
        return 1


def is_version(name: str) -> bool:
    """Whether a folder's name is the number of a version."""
    return name.isascii() and name.isdigit() and len(name) <= 15 and not name.startswith("0")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a run, which has no description: its plan says what it is."""
    return not (folder / DESCRIPTION).exists() and (folder / RECORD).exists()


def verified(folder: Path) -> manifest.Manifest:
    """The manifest, when every file is as it says."""
    found = manifest.read(folder)
    manifest.verify(folder, found, needed=() if is_checkpoint(folder) else (DESCRIPTION, WEIGHTS))
    return found
