"""Patches of public sources that hold no line of them: scripts for `ed`, as `diff -e` prints them.

A command is a line number or two, and a letter: `12,14d` deletes, `12c` and `12a` are followed by our lines and a line
with a full stop. Commands go from the end of the file to its beginning, so that numbers stay those of the source.
"""

import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMMAND = re.compile(r"(\d+)(?:,(\d+))?([acd])")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Lines of the source from `first` on, of which `removed` give way to `added`."""

    first: int
    removed: int
    added: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Changed:
    removed: int
    added: int

    @property
    def lines(self) -> int:
        """A changed line is removed and added, and counts once."""
        return max(self.removed, self.added)

    def __str__(self) -> str:
        return f"−{self.removed} +{self.added}"


def blob_hash(content: bytes) -> str:
    """As `git hash-object` has it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def parse(script: str) -> list[Edit]:
    return list(_edits(iter(script.splitlines())))


def _edits(lines: Iterator[str]) -> Iterator[Edit]:
    for line in lines:
        found = _COMMAND.fullmatch(line)
        if not found:
            raise ValueError(f"no command for ed: {line!r}")
        first, letter = int(found[1]), found[3]
        last = int(found[2] or first)
        added = () if letter == "d" else tuple(iter(lambda: next(lines), "."))
        if letter == "a":
            yield Edit(first=first + 1, removed=0, added=added)
        else:
            yield Edit(first=first, removed=last - first + 1, added=added)


def count(script: str) -> Changed:
    edits = parse(script)
    return Changed(removed=sum(edit.removed for edit in edits), added=sum(len(edit.added) for edit in edits))


def apply(source: bytes, script: str, expected: str) -> str:
    """The patched source; refused if the source is not the one that the patch was made for."""
    found = blob_hash(source)
    if found != expected:
        raise ValueError(f"the source has the hash {found}, and the patch is for {expected}")
    lines = source.decode().splitlines()
    before = len(lines) + 1
    for edit in parse(script):
        if edit.first + edit.removed > before:
            raise ValueError(
                f"the edit of line {edit.first} reaches past line {before - 1}, from which on lines moved"
            )
        lines[edit.first - 1 : edit.first - 1 + edit.removed] = edit.added
        before = edit.first
    return "\n".join(lines) + "\n"


def readable(source: bytes, patched: str, name: str) -> str:
    """As a unified diff, made on the spot."""
    before, after = source.decode().splitlines(), patched.splitlines()
    return "\n".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")) + "\n"
