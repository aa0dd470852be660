"""What must be in a checkpoint for it to be whole: sizes and SHA-256 of its files.

The manifest vouches for itself too, because its sequence number decides which checkpoint is the newest.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from manyhands.checkpoint.disk import Chunks
from manyhands.errors import CheckpointError
from manyhands.foreign.regular import open_regular, read_small

MANIFEST = "manifest.json"
FORMAT = 1

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # the next save counts on from it
FileName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$")
]  # in the directory itself


class FileMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one file is recognised."""

    size_bytes: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint's manifest; `sequence` counts the saves in its directory."""

    format: int = FORMAT
    step: Count
    sequence: Count
    files: dict[FileName, FileMark]
    sha256: str = ""


class _Version(msgspec.Struct):
    format: int


class Marking:
    """Passes chunks through and knows the mark of what has passed."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def through(self, chunks: Chunks) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            self._digest.update(chunk)
            self._size_bytes += len(chunk)
            yield chunk

    def mark(self) -> FileMark:
        return FileMark(size_bytes=self._size_bytes, sha256=self._digest.hexdigest())


def encode(manifest: Manifest) -> bytes:
    """The manifest as readable JSON that contains its own checksum."""
    unsigned = _text(msgspec.structs.replace(manifest, sha256=""))
    return _text(msgspec.structs.replace(manifest, sha256=hashlib.sha256(unsigned).hexdigest()))


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint; every changed byte is noticed."""
    try:
        raw = read_small(directory / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    try:
        version = msgspec.json.decode(raw, type=_Version).format
        if version != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} says format {version}, this version of manyhands reads format {FORMAT}"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest ({error})") from error
    if encode(manifest) != raw:
        raise CheckpointError(f"{MANIFEST} does not match its own checksum")
    return manifest


def verify(directory: Path, manifest: Manifest, needed: Sequence[str] = ()) -> None:
    """Compare every file with its mark, those `needed` among them; sizes first, because they cost nothing."""
    if missing := [name for name in needed if name not in manifest.files]:
        raise CheckpointError(f"{MANIFEST} does not vouch for {', '.join(missing)}")
    for name, mark in manifest.files.items():
        try:
            size_bytes = (directory / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from error
        if size_bytes != mark.size_bytes:
            raise CheckpointError(f"{name} has {size_bytes} bytes instead of {mark.size_bytes}")
    for name, mark in manifest.files.items():
        with open_regular(directory / name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != mark.sha256:
                raise CheckpointError(f"{name} does not match its checksum")


def _text(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
