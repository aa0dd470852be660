"""Everything that saving does to a disk, behind one seam.

All changes to files pass through `Disk`, so that a test can stop the world at any of them. The functions
below it are the few careful sequences that saving is made of.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

Chunks = Iterable[bytes | memoryview]

PARTIAL = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.partial")


class Disk:
    """The real disk: each method is one step that either happened or did not, except `write`."""

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, chunks: Chunks) -> None:
        """Write a file; a crash can leave any part of it."""
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def sync(self, path: Path) -> None:
        """Return when the file's bytes, or the directory's entries, would survive a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within a directory; a file already at the target is replaced."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove one file or one empty directory."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


REAL_DISK = Disk()


def partial_of(path: Path) -> Path:
    """Where this process prepares what will be at `path`, and where it puts what it takes away."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def ensure_directory(disk: Disk, path: Path) -> None:
    """Make a directory and its parents such that they survive a power cut."""
    if not path.is_dir():
        ensure_directory(disk, path.parent)
        disk.make_directory(path)
        disk.sync(path.parent)


def replace_file(disk: Disk, path: Path, chunks: Chunks) -> None:
    """Put a whole new file at `path`: at every moment there is the old one or the new one."""
    partial = partial_of(path)
    disk.write(partial, chunks)
    disk.sync(partial)
    disk.rename(partial, path)
    disk.sync(path.parent)


def remove_tree(disk: Disk, path: Path) -> None:
    """Remove a file, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            remove_tree(disk, child)
    disk.remove(path)


def discard(disk: Disk, paths: Sequence[Path]) -> None:
    """Remove directories such that a crash never leaves half of one under its own name."""
    renamed = [partial_of(path) for path in paths]
    for path, partial in zip(paths, renamed, strict=True):
        disk.rename(path, partial)
    if renamed:
        disk.sync(renamed[0].parent)
    for partial in renamed:
        remove_tree(disk, partial)


def remove_leftovers(disk: Disk, directory: Path, name: re.Pattern[str]) -> None:
    """Remove what earlier saves of `name` left unfinished; a living process keeps its own."""
    for path in sorted(directory.iterdir()):
        match = PARTIAL.fullmatch(path.name)
        if match and name.fullmatch(match["name"]) and not _busy(int(match["pid"])):
            remove_tree(disk, path)


def reason(error: OSError) -> str:
    """What the system said, and about which path."""
    said = error.strerror or str(error)
    return f"{said} ({error.filename})" if error.filename else said


def _busy(pid: int) -> bool:
    """Whether another process may still be writing there; our own earlier attempts are over."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
