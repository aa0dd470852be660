"""Where the planner keeps what it has measured: `manyhands` under the user's cache directory, for this user alone.

Everything there is JSON with a known form; nothing is unpickled. What cannot be read is as if it were not there.
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from manyhands.errors import UsageError
from manyhands.foreign.regular import read_small

T = TypeVar("T", bound=msgspec.Struct)

_LARGEST_BYTES = 1 << 26


def folder() -> Path:
    """`$XDG_CACHE_HOME/manyhands`, or `~/.cache/manyhands`; made where it is not there."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    place = base / "manyhands"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = place.stat().st_uid
    except OSError as error:
        raise UsageError(
            f"cannot make the directory {place} for what is measured ({error.strerror}); set XDG_CACHE_HOME to one "
            "that can be written"
        ) from None
    if owner != os.geteuid():
        raise UsageError(
            f"{place} belongs to another user (number {owner}), who could change what is kept there; set "
            "XDG_CACHE_HOME to a directory of your own"
        )
    return place


def put(path: Path, value: msgspec.Struct) -> None:
    """Write a file as a whole or not at all; only this user can read it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(value))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def get(path: Path, kind: type[T]) -> T | None:
    """What `put` wrote; None where there is nothing of this kind."""
    try:
        return msgspec.json.decode(read_small(path, _LARGEST_BYTES), type=kind)
    except (OSError, ValueError, RecursionError):
        return None
