"""The network connections of one generation, which another thread can cut.

Gloo has no way to give up on a sum: a worker that waits for a host that has vanished waits until its time-out, and
taking the group down waits with it. But its connections are sockets of this process. Shutting them down ends every wait
on them at once, on both hosts where the network still carries that.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Collection, Iterator
from typing import Protocol

from manyhands.comm.transports import newcomers
from manyhands.errors import PeerLost


class Releasable(Protocol):
    def release(self) -> None: ...


class Connections:
    """Connections that were made inside `drawing`; those to `spared` (an address and a port) are another's."""

    def __init__(self, spared: tuple[str, int] | None = None) -> None:
        self._spared = spared
        self._lock = threading.Lock()
        self._before: set[str] | None = None
        self._ports: set[int] = set()
        self._ours: list[socket.socket] = []
        self.is_cut = False
        self.groups: list[Releasable] = []  # whose connections these are

    @contextlib.contextmanager
    def drawing(self, *ports: int) -> Iterator[set[int]]:
        """What is connected meanwhile from or to one of the ports is one of these; raises if they are cut by then.
        Other threads may connect to elsewhere. Ports that are known later can be added to what this gives."""
        with self._lock:
            self._before, self._ports = set(_sockets()), set(ports)
        try:
            yield self._ports
        except RuntimeError as error:
            raise PeerLost(f"the hosts could not connect ({str(error).splitlines()[0]})") from error
        finally:
            with self._lock:
                self._take_new()
                self._before = None
                if self.is_cut:
                    self._shut_down()
        if self.is_cut:
            raise PeerLost("the generation was over before its hosts had met")

    def cut(self) -> None:
        """End every wait; from any thread, and more than once."""
        with self._lock:
            self.is_cut = True
            self._take_new()
            self._shut_down()

    def release(self) -> None:
        """Cut, and wait until the groups have ended."""
        self.cut()
        while self.groups:
            self.groups.pop().release()

    def _take_new(self) -> None:
        if self._before is None:
            return
        for name, fd in _sockets().items():
            if name not in self._before and (found := self._connection(fd)):
                self._before.add(name)
                self._ours.append(found)

    def _connection(self, fd: int) -> socket.socket | None:
        """A second descriptor of a connection: the number of the first may one day be something else's."""
        try:
            found = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[:2] != self._spared:
                ends = {found.getsockname()[1], found.getpeername()[1]}
                if ends & self._ports:
                    return found
        found.close()
        return None

    def _shut_down(self) -> None:
        while self._ours:
            with self._ours.pop() as connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def port_of(place: str | None) -> list[int]:
    """The port of `host:port`, if there is one."""
    return [int(place.rpartition(":")[2])] if place else []


def listening_ports() -> set[int]:
    """Those at which this process waits for connections."""
    return {port for port, _ in _listeners()}


def refuse_newcomers(ports: Collection[int]) -> None:
    """All that are to connect to these ports of this process have done so."""
    for port, listener in _listeners():
        if port in ports:
            with contextlib.suppress(OSError):  # a kernel without filters leaves them open
                newcomers.refuse(listener)


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    for fd in _sockets().values():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            is_network = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_network and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield int(one.getsockname()[1]), one


def _sockets() -> dict[str, int]:
    """The sockets of this process by their names in the kernel."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found[name] = int(entry)
    return found
