"""Sentences for a person at a terminal: lines break between words."""

import itertools
import os
import re
import sys
from typing import TextIO

_WORD = re.compile(r"\s*\S+")
_COMMAND = "  "  # so begins a line to be copied, which stays in one piece


def say(text: str, stream: TextIO | None = None) -> None:
    """Print on standard error or on `stream`."""
    stream = stream or sys.stderr
    print(wrapped(text, width_of(stream)), file=stream, flush=True)


def wrapped(text: str, width: int | None) -> str:
    """With a line break wherever the next word would not fit; None is as wide as can be."""
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        starts = [0, *breaks(line, width), len(line)]
        lines += [line[start:end].rstrip() for start, end in itertools.pairwise(starts)]
    return "\n".join(lines)


def breaks(line: str, width: int) -> list[int]:
    """Where new lines begin in a line that is too long; a word that is too long by itself stays whole."""
    found: list[int] = []
    start = 0
    for word in _WORD.finditer(line) if not line.startswith(_COMMAND) else ():
        begin = word.end() - len(word[0].lstrip())
        if word.end() - start > width and begin > start:
            start = begin
            found.append(start)
    return found


def width_of(stream: TextIO) -> int | None:
    """Columns of a terminal; None of anything else."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):  # not a file of this system, or closed
        return None
