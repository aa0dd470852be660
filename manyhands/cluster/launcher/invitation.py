"""How a worker from outside finds a run: a file in the run's directory that only its owner can read.

It says where the coordinator is, with the keys, what to run, and whose memory the workers of this host share. A worker
on another host needs a copy of it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from manyhands.cluster.coordinator.control import Invitation
from manyhands.cluster.launchers.host_identity import host_identity
from manyhands.errors import UsageError

FILE = "join.json"


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs in order to join."""

    invitation: Invitation
    command: list[str]
    strategy: str | None
    workers: int
    servers: int
    most: int
    launcher: int
    memory_fd: int
    mark: str
    """Of the launcher's host."""

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
        return not self._memory.exists()

    def open_memory(self) -> int:
        """The memory that the run's workers share."""
        try:
            return os.open(self._memory, os.O_RDWR | os.O_CLOEXEC)
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
        return msgspec.json.decode(path.read_bytes(), type=Invite)
    except FileNotFoundError:
        raise UsageError(
            f"no run in {address} takes more workers; start one with --workers 2:6 (2 now, up to 6), and give its --out"
        ) from None
    except PermissionError:
        raise UsageError(f"{path} has the key of that run, and only its owner can read it") from None
    except msgspec.DecodeError:
        raise UsageError(f"{path} is damaged; give the directory of a run that is going on") from None
