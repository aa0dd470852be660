"""What a host and some processes of it use: processor, memory, network; read from /proc.

Everything that grows is given as it has grown since the first look (of a process: since it began), so that a line
which is thinned out of the records, or lost, costs only its moment.

Interfaces count a packet that the network card or the other end of an emulated cable cuts up as one; `segments_*` are
those of TCP as they are on the wire, of all interfaces together.
"""

import os
from collections.abc import Mapping
from pathlib import Path

Counters = dict[str, float]

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Of a line in /proc/net/dev, after the name; of the second line that begins with `Tcp:` in /proc/net/snmp
_INTERFACE = {"bytes_received": 0, "packets_received": 1, "bytes_sent": 8, "packets_sent": 9}
_SEGMENTS = {"InSegs": "segments_received", "OutSegs": "segments_sent"}


class HostUsage:
    """This host, as its network namespace sees it; processor and memory are those of the machine, which several
    emulated hosts may share: then they give the same `machine`."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._machine = self._proc.joinpath("sys/kernel/random/boot_id").read_text()[:8]
        self._first_processor = self._processor()
        self._first_segments = self._segments()
        self._first_interfaces = self._interfaces()

    def sample(self, pids: Mapping[str, int]) -> dict[str, object]:
        """The fields of a "usage" record; `pids` are the processes to tell of, by name."""
        before = self._first_interfaces
        interfaces = {
            name: _since(found, before.setdefault(name, dict.fromkeys(found, 0)))
            for name, found in self._interfaces().items()
        }
        return {
            "machine": self._machine,
            "cores": os.cpu_count() or 1,
            **_since(self._processor(), self._first_processor),
            **self._memory(),
            **_since(self._segments(), self._first_segments),
            "interfaces": {name: found for name, found in interfaces.items() if any(found.values())},
            "processes": {name: found for name, pid in pids.items() if (found := self._process(pid))},
        }

    def _processor(self) -> Counters:
        """Of all cores together, in seconds."""
        with open(self._proc / "stat", "rb") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        user, nice, system, idle, waiting, interrupt, soft_interrupt, steal = ticks
        return {
            "cpu_user_s": (user + nice) / _TICKS,
            "cpu_system_s": (system + interrupt + soft_interrupt) / _TICKS,
            "cpu_steal_s": steal / _TICKS,
            "cpu_idle_s": (idle + waiting) / _TICKS,
        }

    def _memory(self) -> Counters:
        found: dict[bytes, int] = {}
        with open(self._proc / "meminfo", "rb") as file:
            for line in file:
                name, _, rest = line.partition(b":")
                found[name] = int(rest.split()[0]) * 1024
                if name == b"MemAvailable":
                    break
        total = found.get(b"MemTotal", 0)
        return {"memory_bytes": total - found.get(b"MemAvailable", 0), "memory_total_bytes": total}

    def _interfaces(self) -> dict[str, Counters]:
        found = {}
        for line in (self._proc / "net/dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            words = rest.split()
            found[name.strip()] = {what: float(words[place]) for what, place in _INTERFACE.items()}
        return found

    def _segments(self) -> Counters:
        lines = (self._proc / "net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        counted = dict(zip(names, values, strict=True))
        return {ours: float(counted[theirs]) for theirs, ours in _SEGMENTS.items()}

    def _process(self, pid: int) -> Counters | None:
        """Nothing of one that has ended."""
        try:
            words = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        user, system, resident = (int(words[place]) for place in (11, 12, 21))
        return {
            "user_s": user / _TICKS,
            "system_s": system / _TICKS,
            "memory_bytes": resident * _PAGE_BYTES,
        }


def _since(now: Counters, before: Counters) -> Counters:
    return {name: round(value - before[name], 2) for name, value in now.items()}
