"""A stranger on the network, who has no key: benchmarks/attacks.py and the tests start it on a host of its own.

python benchmarks/attack_worker.py attack SECONDS KINDS ADDRESS:PORT ...
python benchmarks/attack_worker.py record INTERFACE FILE

The first attacks those ports for so long in turns, and says on standard output what it has done. The second hears what
passes an interface, as whoever sits between two hosts can, until its standard input is closed; then it writes the first
bytes of every connection, which the kind `replay` sends again (`replay=FILE`).
"""

import base64
import contextlib
import errno
import json
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Target = tuple[str, int]

TURN_S = 0.02
HELD = 1000
SLOW = 100
HALF_OPEN = 1000
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes) -> bytes:
    """What a ZeroMQ client says first, by the published protocol (ZMTP 3.0)."""
    return _SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


@dataclass
class _Link:
    """An open connection: what it still has to say, how much at once, and until when it is held."""

    socket: socket.socket
    rest: bytes
    at_once: int
    until_s: float


class Attack:
    """All kinds, a little of each in every turn."""

    def __init__(self, kinds: dict[str, str], targets: list[Target]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        self.done: Counter[str] = Counter()
        self._targets = targets
        self._links: defaultdict[str, list[_Link]] = defaultdict(list)
        self._turns = 0
        self._recorded = json.loads(Path(kinds["replay"]).read_text()) if kinds.get("replay") else {}
        ways: dict[str, Callable[[Target], None]] = {
            "scan": self._scan,
            "slow": self._slow,
            "hold": self._hold,
            "half-open": self._half_open,
            "garbage": self._garbage,
            "lengths": self._lengths,
            "replay": self._replay,
        }
        self._ways = [ways[kind] for kind in kinds]
        if "half-open" in kinds:
            self._raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            begin_s = time.monotonic()
            target = self._targets[self._turns % len(self._targets)]
            for way in self._ways:
                way(target)
            self._turns += 1
            self._talk()
            time.sleep(max(0.0, begin_s + TURN_S - time.monotonic()))

    # The kinds

    def _scan(self, target: Target) -> None:
        self._open("scan", target, hold_s=0.1)

    def _slow(self, target: Target) -> None:
        """A byte now and then, of what could be a client's; and what the other side says is never read."""
        if len(self._links["slow"]) < SLOW:
            self._open("slow", target, greeting(b"CURVE") + os.urandom(1 << 16), at_once=1, hold_s=60)

    def _hold(self, target: Target) -> None:
        for _ in range(min(20, HELD - len(self._links["hold"]))):
            self._open("hold", target, hold_s=60)

    def _half_open(self, target: Target) -> None:
        """The first packet of a connection alone, from addresses that no host has, so that nothing answers."""
        for _ in range(20 if self.done["half-open"] < HALF_OPEN else 2):
            self._raw.sendto(_syn(f"10.77.0.{240 + self.done['half-open'] % 10}", target), (target[0], 0))
            self.done["half-open"] += 1

    def _garbage(self, target: Target) -> None:
        self._open("garbage", target, os.urandom(4096), hold_s=0.5)

    def _lengths(self, target: Target) -> None:
        """Lengths of what would fill the memory, where ZeroMQ, PyTorch's store and Gloo have theirs."""
        huge = (1 << 62) - 1
        ways = (
            greeting(b"NULL") + b"\x06" + struct.pack(">Q", huge),
            greeting(b"CURVE") + b"\x06" + struct.pack(">Q", huge) + bytes(200),
            greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + os.urandom(194),
            b"\x09" + struct.pack("<IQ", 0x3C85F7CE, huge) + bytes(64),  # as the store's protocol begins
            b"\x00" + struct.pack("<QQ", huge, huge) + bytes(64),
            struct.pack("<QQ", huge, huge) * 8,
            b"\xff" * 512,
        )
        self._open("lengths", target, ways[self._turns // len(self._targets) % len(ways)], hold_s=0.5)

    def _replay(self, target: Target) -> None:
        streams = self._recorded.get(str(target[1])) or [
            one for each in self._recorded.values() for one in each
        ]
        if streams:
            stream = streams[self._turns // len(self._targets) % len(streams)]
            self._open("replay", target, base64.b64decode(stream), hold_s=0.5)

    # Connections

    def _open(
        self, kind: str, target: Target, content: bytes = b"", *, at_once: int = 1 << 20, hold_s: float
    ) -> None:
        link = socket.socket()
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        if link.connect_ex(target) not in (0, errno.EINPROGRESS):
            link.close()
            self.done[f"{kind}: refused"] += 1
            return
        self.done[kind] += 1
        self._links[kind].append(_Link(link, content, at_once, time.monotonic() + hold_s))

    def _talk(self) -> None:
        """Go on with every connection; those that the other side has closed, or whose time is over, end."""
        now_s, poll = time.monotonic(), select.poll()
        by_number = {}
        for kind, links in self._links.items():
            # What only holds needs a look now and then; a byte of a slow one has time as well.
            if kind in ("hold", "slow") and self._turns % 25:
                continue
            for link in links:
                by_number[link.socket.fileno()] = (kind, link)
                poll.register(link.socket, select.POLLIN | select.POLLOUT)
        closed = set()
        for number, events in poll.poll(0):
            kind, link = by_number[number]
            if events & (select.POLLHUP | select.POLLERR):
                closed.add(number)
            elif events & select.POLLOUT and link.rest:
                with contextlib.suppress(OSError):
                    sent = link.socket.send(link.rest[: link.at_once])
                    link.rest = link.rest[sent:]
                    self.done["bytes"] += sent
            elif events & select.POLLIN and kind != "slow" and _is_over(link.socket):
                closed.add(number)
        for number, (kind, link) in by_number.items():
            if number in closed or now_s > link.until_s:
                self.done[f"{kind}: closed by the other side"] += number in closed
                self._links[kind].remove(link)
                link.socket.close()


def _is_over(link: socket.socket) -> bool:
    try:
        return not link.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _syn(source: str, target: Target) -> bytes:
    """An IP packet with the first packet of a TCP connection; the kernel fills in length and checksum of the first."""
    addresses = socket.inet_aton(source) + socket.inet_aton(target[0])
    port = 1024 + int.from_bytes(os.urandom(2), "big") % 60000

    def tcp(checksum: int) -> bytes:
        return struct.pack(
            "!HHIIBBHHH",
            port,
            target[1],
            int.from_bytes(os.urandom(4), "big"),
            0,
            5 << 4,
            2,
            64240,
            checksum,
            0,
        )

    packet = tcp(0)
    words = struct.unpack("!16H", addresses + struct.pack("!BBH", 0, 6, 20) + packet)
    total = sum(words)
    total = (total & 0xFFFF) + (total >> 16)
    total = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    packet = packet[:16] + struct.pack("!H", total) + packet[18:]
    return struct.pack("!BBHHHBBH", 0x45, 0, 0, 0, 0, 64, 6, 0) + addresses + packet


# Recording


def streams(interface: str) -> Iterator[tuple[tuple[bytes, int, int], int, bytes]]:
    """What passes: the connection (source, its port, the port that it goes to), the place in it, and the bytes."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
        wire.bind((interface, 0))
        while True:
            ready, _, _ = select.select([wire, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            packet = wire.recv(1 << 17)
            if packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
                continue
            start = 14 + 4 * (packet[14] & 15)
            ports, place = struct.unpack("!2H", packet[start : start + 4]), packet[start + 4 : start + 8]
            content = packet[
                start + 4 * (packet[start + 12] >> 4) : 14 + int.from_bytes(packet[16:18], "big")
            ]
            if content:
                yield (packet[26:30], *ports), int.from_bytes(place, "big"), content


def record(interface: str, path: Path) -> None:
    found: defaultdict[tuple[bytes, int, int], bytearray] = defaultdict(bytearray)
    places: dict[tuple[bytes, int, int], int] = {}
    for connection, place, content in streams(interface):
        if places.get(connection, place) == place and len(found[connection]) < 1 << 16:
            found[connection] += content
            places[connection] = (place + len(content)) & 0xFFFFFFFF
    by_port: defaultdict[int, list[str]] = defaultdict(list)
    for (_, _, port), content in found.items():
        by_port[port].append(base64.b64encode(content).decode())
    path.write_text(json.dumps(by_port))


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "record":
        record(words[0], Path(words[1]))
        return
    seconds, kinds, *places = words
    targets = [(address, int(port)) for address, _, port in (place.rpartition(":") for place in places)]
    named = {name: value for name, _, value in (kind.partition("=") for kind in kinds.split(","))}
    attack = Attack(named, targets)
    attack.run(float(seconds))
    print(json.dumps({**attack.done, "processor_s": time.process_time()}))


if __name__ == "__main__":
    main()
