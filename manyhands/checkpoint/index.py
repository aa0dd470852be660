"""The checkpoints of one run and which of them is the newest.

Newest means saved last, not the highest step: a run that went back to step 100 and then saved step 110 goes
on from 110, although an abandoned 120 may still be there. The manifests count the saves.
"""

import re
from pathlib import Path

from manyhands.checkpoint import manifest
from manyhands.errors import CheckpointError
from manyhands.foreign.regular import read_small

POINTER = "latest"
# `.replaced` is the old checkpoint of a step that is saved again; it counts until the new one is in place.
NAME = re.compile(r"step-(?P<step>[0-9]{8,15})(?P<replaced>\.replaced)?")
# A copy of the state that did not fit into memory.
COPY = "copy"
# A save that is cut short leaves files called after one of these.
OURS = re.compile(rf"{NAME.pattern}|{POINTER}|{COPY}")


def place_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"step-{step:08d}"


def replaced_place(place: Path) -> Path:
    """Where a checkpoint waits while another takes its place."""
    return place.with_name(f"{place.name}.replaced")


def original_place(replaced: Path) -> Path:
    """The place that a replaced checkpoint had."""
    return replaced.with_name(replaced.name.removesuffix(".replaced"))


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """The steps and places of all checkpoints in a directory, lowest step first."""
    if not directory.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match["step"]), path) for match, path in matches if match and path.is_dir())


def newest_first(directory: Path) -> list[Path]:
    """All checkpoints in a directory, damaged ones included; the one saved last comes first."""
    pointed = _pointed(directory)
    ranked = []
    sequence = 0
    for step, path in checkpoints(directory):
        damaged = False
        try:
            sequence = manifest.read(path).sequence
        except CheckpointError:
            # Its number is lost: it came after the step below it, or even last if the pointer says so.
            damaged = True
        ranked.append((damaged and path == pointed, sequence, step, path))
    return [path for *_, path in sorted(ranked, reverse=True)]


def next_sequence(directory: Path) -> int:
    """The number of the next save here."""
    highest = 0
    for _, path in checkpoints(directory):
        try:
            highest = max(highest, manifest.read(path).sequence)
        except CheckpointError:
            continue
    return highest + 1


def latest(directory: Path) -> Path | None:
    """The checkpoint of the last save that ended well, or None; its contents are not looked at."""
    return _pointed(directory) or next(iter(newest_first(directory)), None)


def _pointed(directory: Path) -> Path | None:
    try:
        name = read_small(directory / POINTER).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return directory / name if NAME.fullmatch(name) and (directory / name).is_dir() else None
