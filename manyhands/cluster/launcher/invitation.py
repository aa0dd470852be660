"""How a worker from outside finds a run: a file in the run's directory that only its owner can read.

It says where the coordinator is, with the keys, what to run, and whose memory the workers of this host share. A worker
on another host needs a copy of it.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from manyhands.cluster.coordinator.control import Invitation
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.host_identity import host_identity
from manyhands.comm.transports import peer_user
from manyhands.errors import UsageError
from manyhands.foreign.regular import read_small

FILE = "join.json"

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Word = Annotated[str, msgspec.Meta(pattern="^[^\0]*$")]  # that a process can be given


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs in order to join."""

    invitation: Invitation
    command: list[Word]
    strategy: Word | None
    workers: Count
    servers: Count
    most: Count
    launcher: Count
    memory_fd: Count
    mark: str
    """Of the launcher's host."""
    codec: Word | None = None

    @property
    def chosen(self) -> dict[str, str]:
        """The variables by which the launcher's choices reach a script."""
        given = {local.STRATEGY: self.strategy, local.CODEC: self.codec}
        return {name: value for name, value in given.items() if value}

    @property
    def takes_hosts(self) -> bool:
        """Whether other hosts can reach the coordinator."""
        return self.invitation.endpoint.startswith("tcp://")

    @property
    def is_here(self) -> bool:
        """Whether the run's launcher is on this host."""
        return self.mark == host_identity()

    @property
    def _memory(self) -> Path:
        return Path(f"/proc/{self.launcher}/fd/{self.memory_fd}")

    def is_over(self) -> bool:
        """Whether the run's launcher is gone, and with it the run."""
        return not self._is_memory()

    def _is_memory(self) -> bool:
        """Whether that is a memory at all: after a launcher was killed, another process may have its number."""
        try:
            return os.readlink(self._memory).startswith("/memfd:")
        except OSError:
            return False

    def open_memory(self) -> int:
        """The memory that the run's workers share."""
        try:
            if not self._is_memory():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return peer_user.opened(self._memory, os.O_RDWR)
        except OSError as error:
            raise UsageError(
                f"the run cannot be joined: its launcher (process {self.launcher}) is not on this host, not "
                f"yours or no longer there ({error.strerror})"
            ) from None


@contextmanager
def published(run: Path, invite: Invite) -> Iterator[None]:
    """While the run goes on, others may join it."""
    path = run / FILE
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(invite))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read(address: str) -> Invite:
    """The invitation of the run in this directory."""
    path = Path(address) / FILE
    try:
        content = read_small(path, admit=partial(_refuse_shared, path))
        return msgspec.json.decode(content, type=Invite)
    except FileNotFoundError:
        raise UsageError(
            f"no run in {address} takes more workers; start one with --workers 2:6 (2 now, up to 6), and give its --out"
        ) from None
    except PermissionError:
        raise UsageError(f"{path} has the key of that run, and only its owner can read it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give the directory of a run") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise UsageError(f"{path} is damaged; give the directory of a run that is going on") from None


def _refuse_shared(path: Path, found: os.stat_result) -> None:
    """What a joining worker runs is in the file, and the key: no other user may have written or read it."""
    if found.st_uid not in peer_user.trusted_users():
        raise UsageError(
            f"{path} belongs to another user (number {found.st_uid}), and to join would run what it says; copy it "
            "from a run of your own"
        )
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{path} has the key of the run, and other users can open it (mode {mode | 0o600:o}); "
            f"use chmod 600 {path}"
        )
