"""By which address a host is reached."""

import errno
import socket

from manyhands.errors import UsageError

_BACKLOG = 256

_held: dict[int, socket.socket] = {}  # by port


def address_towards(address: str) -> str:
    """The address of this host that it would use to reach another."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # no packet is sent: the kernel only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"there is no way from here to {address} ({error}); check the network") from None


def outward_address() -> str:
    """The address of this host that leads to others."""
    try:
        return address_towards("192.0.2.1")  # of no host: for documentation
    except UsageError:
        raise UsageError(
            "this host has no way to others; say at which of its addresses they join, as in --hosts 2@10.0.0.1"
        ) from None


def parse_hosts(text: str) -> tuple[int, str]:
    """`2`, or `2@10.0.0.1` or `2@10.0.0.1:29400` to say at which address and port of this host the others join."""
    number, _, place = text.partition("@")
    port = place.partition(":")[2]
    if not number.isdecimal() or not (port or "1").isdecimal() or int(port or "1") >= 1 << 16:
        raise UsageError(f"hosts={text!r} is neither a number of hosts nor like 2@10.0.0.1")
    if int(number) < 1:
        raise UsageError(f"hosts={text!r}: there must be at least 1 host")
    return int(number), place


def meeting_address(place: str) -> str:
    """Where the coordinator listens, with what was not said filled in."""
    address, _, port = place.partition(":")
    address = address or outward_address()
    return f"{address}:{hold_port(address, int(port or '0'))}"


def hold_port(address: str, port: int = 0) -> int:
    """A free port of that address: this one, or any if it is 0. This process listens there from now on.

    A port that is only bound could be taken by any process, also of another user, that sets SO_REUSEADDR and listens.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago is free
    try:
        holder.bind((address, port))
        holder.listen(_BACKLOG)
    except OSError as error:
        holder.close()
        reason = error.strerror
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"{address} is no address of this host ({reason}); name one of its own"
            ) from None
        raise UsageError(
            f"port {port} of {address} cannot be had ({reason}); name another, or none"
        ) from None
    held = int(holder.getsockname()[1])
    _held[held] = holder
    return held


def take_over(port: int) -> socket.socket | None:
    """The listener that holds this port, if this process holds it; it is the caller's from now on."""
    return _held.pop(port, None)


def listen(address: str) -> socket.socket:
    """A listener at a free port of this address, and at no other address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
