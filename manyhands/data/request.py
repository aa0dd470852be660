"""What a person asked for, and what a source of data offers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.data.sets import Data
from manyhands.errors import UsageError

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and how much there is (None: unknown)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One `--data` text with the options that came along."""

    text: str
    pieces: tuple[str, ...] = ()
    seed: int = 0
    size: int | None = None
    augment: bool = False
    directory: Path | None = None
    fetch: bool = False
    progress: Progress | None = None

    def path(self, form: str) -> Path:
        """The file or folder that the text names; a path may itself hold colons."""
        if not self.pieces or not self.pieces[0]:
            raise UsageError(f"--data {self.text}: say which one, as in {form}")
        return Path(":".join(self.pieces)).expanduser()


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """For sources that have nothing to set."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A row of the table: how it is written, what it is, and how to load it."""

    form: str
    description: str
    load: Callable[[Request, Any], Data] = field(repr=False)
    settings: type = NoSettings
    sized: bool = True
    """Whether its samples are pictures that can be scaled to a size."""
    augmented: bool = False
    """Whether its pictures still mean the same when moved and mirrored."""
