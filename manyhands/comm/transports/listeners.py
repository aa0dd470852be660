"""The TCP ports at which other processes of this host listen, as the kernel's tables have them."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.comm.transports import newcomers

_LISTENS = "0A"  # of the states in /proc/net/tcp
_TABLES = ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6"))


@dataclass(frozen=True, kw_only=True, order=True)
class Listener:
    """A socket that listens; several processes may hold it."""

    port: int
    address: str
    inode: str
    is_closed: bool
    """Whether it takes no more connections, as `newcomers.py` has it."""


def listeners_of(pid: int) -> Iterator[Listener]:
    """Those that the process holds; none of a process that has ended or is another user's."""
    held = _sockets_of(pid)
    for family, name in _TABLES if held else ():
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and words[9] in held:
                    place, _, port = words[1].partition(":")
                    yield Listener(
                        port=int(port, 16),
                        address=_address(family, place),
                        inode=words[9],
                        is_closed=newcomers.are_refused(pid, held[words[9]]),
                    )


def _sockets_of(pid: int) -> dict[str, int]:
    """The process's descriptors of its sockets, by what the kernel calls these."""
    found = {}
    folder = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        for descriptor in os.listdir(folder):
            with suppress(OSError):
                kind, _, inode = os.readlink(folder / descriptor).partition(":")
                if kind == "socket":
                    found[inode.strip("[]")] = int(descriptor)
    return found


def _address(family: int, place: str) -> str:
    """The table has 32 bits after the other, each as this machine keeps numbers."""
    raw = bytes.fromhex(place)
    words = (int.from_bytes(raw[at : at + 4], "big") for at in range(0, len(raw), 4))
    return socket.inet_ntop(family, b"".join(socket.htonl(word).to_bytes(4, "big") for word in words))
