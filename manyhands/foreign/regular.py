"""How files that others may have made are opened, and how a run's own are written where others may have been.

What is refused is an OSError with a reason, which each reader turns into a sentence of its own.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedReader

SMALL_BYTES = 1 << 20
"""What specs, plans, manifests, invitations and summaries may have."""


def open_regular(path: Path) -> "BufferedReader":
    """A file to read. Pipes and devices, at which a reader could wait without end, are refused; links are followed."""
    return _opened(path, or_pipe=False)


def read_small(
    path: Path,
    most: int = SMALL_BYTES,
    *,
    or_pipe: bool = False,
    admit: Callable[[os.stat_result], None] = lambda found: None,
) -> bytes:
    """All of a file that has at most so many bytes; `admit` refuses one by its owner or mode before it is read."""
    with _opened(path, or_pipe=or_pipe) as file:
        admit(found := os.fstat(file.fileno()))
        size = found.st_size
        content = file.read(most + 1 if or_pipe else min(size, most) + 1)
    if max(size, len(content)) > most:
        has = f"{size:,} bytes" if size > most else "more"
        raise OSError(errno.EFBIG, f"it has {has}, and at most {most:,} bytes are read", str(path))
    return content


def not_through_links(path: str, flags: int) -> int:
    """For `open(…, opener=not_through_links)`: writes to a run's own file, never to one that a link names."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link to another place", path) from None


def _opened(path: Path, *, or_pipe: bool) -> "BufferedReader":
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if or_pipe else os.O_NONBLOCK))
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", repr(str(path))) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (or_pipe and not stat.S_ISDIR(mode)):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
