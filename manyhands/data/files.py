"""Where data files are, and how they are written so that a half-written one is never found."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def data_directory(directory: Path | None) -> Path:
    """The given folder, else $MANYHANDS_DATA, else ~/.cache/manyhands."""
    if directory is not None:
        return directory.expanduser()
    return Path(os.environ.get("MANYHANDS_DATA") or "~/.cache/manyhands").expanduser()


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary name beside `target` to write to; it takes the target's place if nothing went wrong."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        beside = Path(folder) / target.name
        yield beside
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, target)
