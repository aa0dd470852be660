"""By which address a host is reached."""

import socket

from manyhands.errors import UsageError


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


def free_port(address: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise UsageError(
                f"{address} is no address of this host ({error.strerror}); name one of its own"
            ) from None
        return int(probe.getsockname()[1])
