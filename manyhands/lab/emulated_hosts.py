"""Several hosts on one machine: network namespaces joined by a virtual switch.

    host 0 [eth0] ── [port0]┐
    host 1 [eth0] ── [port1]┤ switch (a bridge in a namespace of its own)
    host 2 [eth0] ── [port2]┘

Processes of different hosts reach each other only through these links, which can be slow or cut.
Memory, files and cores are shared: this emulates networks, not machines.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Collection

from manyhands.errors import ManyhandsError, UsageError

# What a link may send at once after a pause, as the time it takes to earn it. With less, a link falls behind its rate
# whenever a busy processor serves it late; with more, short transfers would not notice the limit.
BUCKET_S = 0.01
INTERFACE = "eth0"  # the name that each host has for its own
_MOST_HOSTS = 250
_serial = itertools.count()


def available() -> str | None:
    """None if hosts can be emulated here, else the reason why not."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"emulated hosts need the command {tool} (package iproute2)"
    try:
        with EmulatedHosts(1, bandwidth_mbit=100):
            return None
    except ManyhandsError as error:
        return f"emulated hosts are not permitted here: {error}"


class EmulatedHosts:
    """`count` hosts with addresses in 10.77.0.0/24; leaving the context removes all that entering made."""

    def __init__(self, count: int, *, bandwidth_mbit: float | None = None) -> None:
        if not 1 <= count <= _MOST_HOSTS:
            raise UsageError(f"cannot emulate {count} hosts; use 1 to {_MOST_HOSTS}.")
        if bandwidth_mbit is not None and bandwidth_mbit <= 0:
            raise UsageError(f"a link of {bandwidth_mbit:g} Mbit/s carries nothing; use more than 0.")
        self.count = count
        self.bandwidth_mbit = bandwidth_mbit
        self._hosts = [_unique_name() for _ in range(count)]
        self._switch = _unique_name()

    def __enter__(self) -> "EmulatedHosts":
        with contextlib.ExitStack() as undo:
            for namespace in (self._switch, *self._hosts):
                _call("ip", "netns", "add", namespace)
                # Interfaces go with their namespace, so this is all there is to undo.
                undo.callback(_call, "ip", "netns", "delete", namespace)
            for bridge in ("bridge0", "bridge1"):  # the second is for those who are parted from the others
                _in(self._switch, "link", "add", bridge, "type", "bridge")
                _in(self._switch, "link", "set", bridge, "up")
            for host in range(self.count):
                self._connect(host)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def command_prefix(self, host: int) -> list[str]:
        """What to put before a command to run it on this host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def address(self, host: int) -> str:
        """The host's address, reachable from all the others."""
        return f"10.77.0.{host + 1}"

    def interface(self, host: int) -> str:
        """The name that the host itself has for its network interface."""
        return INTERFACE

    def cut(self, host: int) -> None:
        """Pull the host's cable: it keeps its address, and no message reaches it."""
        _in(self._switch, "link", "set", _port(host), "down")

    def deafen(self, host: int) -> None:
        """A cut in one direction: the host still sends, and hears nothing."""
        _shape(self._switch, _port(host), "blackhole")

    def mute(self, host: int) -> None:
        """A cut in the other direction: the host still hears, and nothing that it sends arrives."""
        _shape(self._hosts[host], "eth0", "blackhole")

    def slow(self, host: int, mbit: float) -> None:
        """Limit the host's link in both directions."""
        self._limit(host, mbit)

    def heal(self, host: int) -> None:
        """Plug the cable in again; it carries what it did at first."""
        _in(self._switch, "link", "set", _port(host), "master", "bridge0")
        _in(self._switch, "link", "set", _port(host), "up")
        self._limit(host, self.bandwidth_mbit)

    def part(self, side: Collection[int]) -> None:
        """Divide the hosts in two sides that do not hear each other; `heal` gives a host back to all."""
        for host in side:
            _in(self._switch, "link", "set", _port(host), "master", "bridge1")

    def processes(self, host: int) -> list[int]:
        """The ids of all processes on this host."""
        return [int(word) for word in _call("ip", "netns", "pids", self._hosts[host]).split()]

    def _connect(self, host: int) -> None:
        name, port, switch = self._hosts[host], _port(host), self._switch
        _in(name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _in(name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _in(name, "link", "set", "lo", "up")
        _in(name, "link", "set", "eth0", "up")
        _in(switch, "link", "set", port, "master", "bridge0")
        _in(switch, "link", "set", port, "up")
        if self.bandwidth_mbit is not None:
            self._limit(host, self.bandwidth_mbit)

    def _limit(self, host: int, mbit: float | None) -> None:
        """What either end of the cable sends; None: as fast as it can."""
        for namespace, interface in ((self._hosts[host], "eth0"), (self._switch, _port(host))):
            _shape(namespace, interface, *(["noqueue"] if mbit is None else _bucket(mbit)))


def _unique_name() -> str:
    return f"mh-{os.getpid()}-{next(_serial)}"


def _port(host: int) -> str:
    return f"port{host}"


def _bucket(mbit: float) -> list[str]:
    """A link of this speed."""
    rate_bytes = mbit * 1e6 / 8
    burst = f"{max(16_000, int(rate_bytes * BUCKET_S))}b"
    return ["tbf", "rate", f"{int(mbit * 1e6)}bit", "burst", burst, "latency", "100ms"]


def _shape(namespace: str, interface: str, *queue: str) -> None:
    """How this end sends; the other end of the cable has the other direction."""
    _call("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *queue)


def _in(namespace: str, *arguments: str) -> None:
    _call("ip", "-n", namespace, *arguments)


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ManyhandsError(f"`{command[0]}` cannot be run ({error.strerror}); install iproute2.") from None
    if done.returncode != 0:
        raise ManyhandsError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
