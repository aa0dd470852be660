"""Watches a run, or a folder of versions, and says which whole versions are there.

Both are written by preparing a folder and renaming it, so the parent's time of change tells that something came or
went: a look costs one `stat`, twenty times a second. Whatever else happens to a folder is found once a second.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from manyhands.checkpoint import index, manifest
from manyhands.errors import CheckpointError, UsageError
from manyhands.serving.stream import ModelVersion
from manyhands.serving.version_folder import is_version

LOOK_S = 0.05
_THOROUGHLY_S = 1.0


class VersionSource:
    """The versions of one model, from one place."""

    def __init__(self, model: str, path: Path) -> None:
        if not path.is_dir():
            raise UsageError(
                f"there is no folder {path} to serve {model} from; give the directory of a run, or of versions"
            )
        self.model = model
        self.path = path
        self._found: list[ModelVersion] = []
        self._seen_ns = 0
        self._looked_s = -math.inf

    def look(self, now_s: float) -> list[ModelVersion]:
        """All whole versions that are there now; `now_s` is any clock."""
        folder = self._folder()
        try:
            changed_ns = os.stat(folder).st_mtime_ns
        except OSError:  # removed: what is served goes on until there is something else
            return self._found
        if changed_ns != self._seen_ns or now_s - self._looked_s > _THOROUGHLY_S:
            self._seen_ns, self._looked_s = changed_ns, now_s
            with contextlib.suppress(OSError):  # not readable for the moment: as if it were removed
                self._found = sorted(self._versions(folder))
        return self._found

    def _folder(self) -> Path:
        checkpoints = self.path / "checkpoints"
        return checkpoints if checkpoints.is_dir() else self.path

    def _versions(self, folder: Path) -> Iterator[ModelVersion]:
        if (folder / manifest.MANIFEST).exists():  # a version itself
            yield from self._version(folder, int(folder.name) if is_version(folder.name) else None)
            return
        for _, place in index.checkpoints(folder):
            if place == index.original_place(place):
                yield from self._version(place, None)
        try:
            names = [name for name in os.listdir(folder) if is_version(name)]
        except OSError:
            return
        for name in names:
            yield from self._version(folder / name, int(name))

    def _version(self, place: Path, number: int | None) -> Iterator[ModelVersion]:
        """Nothing while there is no manifest yet, or none that vouches for itself."""
        try:
            status = os.stat(place / manifest.MANIFEST)
            # Checkpoints count by the order in which they were saved: a run may go back to an earlier step.
            found = manifest.read(place).sequence if number is None else number
        except (OSError, CheckpointError):
            return
        # The later one of two folders that had the same number one after the other comes last in their order.
        mark = f"{status.st_mtime_ns:020}-{status.st_ino}"
        yield ModelVersion(model=self.model, version=max(found, 1), mark=mark, place=place)
