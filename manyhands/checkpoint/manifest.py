"""What must be in a checkpoint for it to be whole: sizes and SHA-256 of its files.

The manifest vouches for itself too, because its sequence number decides which checkpoint is the newest.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from manyhands.checkpoint.disk import Chunks
from manyhands.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


class FileMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one file is recognised."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint's manifest; `sequence` counts the saves in its directory."""

    format: int = FORMAT
    step: int
    sequence: int
    files: dict[str, FileMark]
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
        raw = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    try:
        version = msgspec.json.decode(raw, type=_Version).format
        if version != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} says format {version}, this version of manyhands reads format {FORMAT}"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest ({error})") from error
    if encode(manifest) != raw:
        raise CheckpointError(f"{MANIFEST} does not match its own checksum")
    return manifest


def verify(directory: Path, manifest: Manifest) -> None:
    """Compare every file with its mark; sizes first, because they cost nothing."""
    for name, mark in manifest.files.items():
        try:
            size_bytes = (directory / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from error
        if size_bytes != mark.size_bytes:
            raise CheckpointError(f"{name} has {size_bytes} bytes instead of {mark.size_bytes}")
    for name, mark in manifest.files.items():
        with (directory / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != mark.sha256:
                raise CheckpointError(f"{name} does not match its checksum")


def _text(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
