"""Members of a tar archive, taken out by name into memory: nothing is written where the archive says."""

import gzip
import os
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from manyhands.foreign.regular import open_regular

LARGEST_MEMBER = 64 << 20
LARGEST_ARCHIVE = 256 << 20
"""Unpacked. The published one of CIFAR-10 has 185 MB."""


class _Counted:
    """What comes out of a file, up to a limit: headers, too, may say how long they are."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = LARGEST_ARCHIVE

    def read(self, length: int) -> bytes:
        found: bytes = self._file.read(min(length, self._left + 1))
        self._left -= len(found)
        if self._left < 0:
            raise OSError(f"it unpacks to more than {LARGEST_ARCHIVE >> 20} MiB")
        return found


def members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The files with these names, in whatever folder of the archive they are; links and devices are passed over."""
    found: dict[str, bytes] = {}
    with open_regular(path) as packed:
        is_packed = packed.read(2) == b"\x1f\x8b"
        packed.seek(0, os.SEEK_SET)
        stream: Any = _Counted(gzip.GzipFile(fileobj=packed) if is_packed else packed)
        with tarfile.open(
            fileobj=stream, mode="r|"
        ) as tar:  # a stream never goes back, so it comes to an end
            for member in tar:
                name = Path(member.name).name
                if name not in names or not member.isreg() or member.issparse():
                    continue
                if member.size > LARGEST_MEMBER:
                    raise OSError(
                        f"{name} has {member.size:,} bytes, and at most {LARGEST_MEMBER:,} are read"
                    )
                file = tar.extractfile(member)
                found[name] = file.read() if file is not None else b""
    return found
