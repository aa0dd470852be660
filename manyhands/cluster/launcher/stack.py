"""A worker's Python stack, as `faulthandler` writes it, and what it says of the worker."""

import linecache
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_PACKAGE = Path(__file__).resolve().parents[2]
_STANDARD = Path(os.__file__).resolve().parent
_LONGEST_LINE = 60

# Of our package: where a worker waits for others, and where it writes a checkpoint. All else is its own work.
_MEETINGS = (
    "comm",
    "servers/worker",
    "servers/transport",
    "cluster/worker/member",
    "cluster/worker/rendezvous",
    "cluster/worker/world",
)
_SERVING = ("servers/process",)
_SAVING = ("checkpoint", "engine/save", "engine/saver", "engine/snapshot")


class Doing(Enum):
    """What a process is doing."""

    WAITS = auto()
    """For others."""
    SAVES = auto()
    SERVES = auto()
    """It is a server: it waits for workers unless it computes."""
    WORKS = auto()
    """Or waits for something that is none of ours: a lock, a file, a queue."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def part(self) -> str | None:
        """Which part of our package the frame belongs to, as a path without its ending; None where it is not ours."""
        path = Path(self.file)
        return (
            path.relative_to(_PACKAGE).with_suffix("").as_posix() if path.is_relative_to(_PACKAGE) else None
        )

    @property
    def is_of_a_library(self) -> bool:
        path = Path(self.file)
        names = {"site-packages", "dist-packages"}
        return self.file.startswith("<") or not names.isdisjoint(path.parts) or path.is_relative_to(_STANDARD)


def parse(lines: Iterable[str]) -> list[Frame]:
    """The frames, the innermost first; of several stacks the last."""
    frames: list[Frame] = []
    for line in lines:
        if found := _FRAME.fullmatch(line):
            frames.append(Frame(found[1], int(found[2]), found[3]))
        elif line.startswith(("Stack", "Current", "Thread")):
            frames.clear()
    return frames


def doing(frames: Sequence[Frame]) -> Doing:
    """What the innermost frame that is no library's says; a server is one however it waits."""
    if any(_is_in(frame.part or "", _SERVING) for frame in frames):
        return Doing.SERVES
    for frame in frames:
        if (part := frame.part) is not None:
            if _is_in(part, _SAVING):
                return Doing.SAVES
            return Doing.WAITS if _is_in(part, _MEETINGS) else Doing.WORKS
        if "torch/distributed/" in frame.file:
            return Doing.WAITS
        if not frame.is_of_a_library:
            return Doing.WORKS
    return Doing.WORKS


def _is_in(part: str, parts: Sequence[str]) -> bool:
    return any(part == one or part.startswith(f"{one}/") for one in parts)


def place(frames: Sequence[Frame]) -> str:
    """The innermost line of the user's own, and where in a library that has led; ours where the user has none."""
    own = [frame for frame in frames if frame.part is None and not frame.is_of_a_library]
    shown = own[0] if own else frames[0]
    inside = frames[0]
    more = f" (inside {Path(inside.file).name}:{inside.line} {inside.function})" if inside != shown else ""
    line = linecache.getline(shown.file, shown.line).partition("  #")[0].strip()
    line = f": {line[:_LONGEST_LINE]}" if line else ""
    return f"{_short(shown.file)}:{shown.line} in {shown.function}{line}{more}"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
