"""Which user is at the other end: a process speaks with processes of its own user, and of root, alone.

A socket with an abstract name has no permissions: any user of the machine can connect to it, and its name can be read
in /proc/net/unix. So the kernel is asked who connects (SO_PEERCRED) before a byte is read. It is asked, too, whose the
memory is that is opened by a process id, which may by now be that of another process.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands import telemetry

if TYPE_CHECKING:
    import zmq

_AT_ONCE = 64  # who connects without end must not keep a listener from those that it has
_BACKLOG = 256
_CONNECT_S = 0.1


def trusted_users() -> tuple[int, ...]:
    """Those whose processes may speak with this one; root can read its memory anyway."""
    return tuple({0, os.geteuid()})


def is_trusted(link: socket.socket) -> bool:
    """Whether the process at the other end of a local socket may speak with this one."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user in trusted_users()


def listen(name: str, kind: socket.SocketKind) -> socket.socket:
    """A listener with an abstract name; no process may be able to know the name before."""
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(f"\0{name}")
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections that wait, up to so many; those of other users are closed unread."""
    with suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            link, _ = listener.accept()
            if is_trusted(link):
                yield link
            else:
                telemetry.count("strangers", 1)
                link.close()


def connect(name: str, kind: socket.SocketKind) -> socket.socket | None:
    """A connection with the process that listens there; None if there is none yet, or if it is another user's."""
    link = socket.socket(socket.AF_UNIX, kind)
    link.settimeout(_CONNECT_S)  # another user's listener may never accept
    with suppress(ConnectionRefusedError, FileNotFoundError, BlockingIOError, TimeoutError):
        link.connect(f"\0{name}")
        if is_trusted(link):
            link.setblocking(True)
            return link
    link.close()
    return None


def guard(socket: "zmq.Socket[bytes]") -> None:
    """Have a ZeroMQ socket close connections of other users unread; before it is bound to a local address."""
    import zmq

    for user in trusted_users():
        socket.setsockopt(zmq.IPC_FILTER_UID, user)


def opened(path: Path, flags: int) -> int:
    """A descriptor of memory that is another process's, by its path in /proc."""
    # In another container the same numbers may be anything: do not wait for it, do not take it as a terminal.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if os.fstat(fd).st_uid not in trusted_users():
        os.close(fd)
        raise PermissionError(errno.EPERM, "it is another user's", str(path))
    return fd
