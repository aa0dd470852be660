"""Processor, memory and network of each host over the time of a run, from the "usage" records of its launchers."""

from collections.abc import Iterator

import numpy as np

from manyhands.dashboard.buckets import Buckets
from manyhands.telemetry.lines import Record, number

MOST_HOSTS = 256
CURVES = ("cpu", "memory", "sent", "received")
_BUSY = ("cpu_user_s", "cpu_system_s", "cpu_steal_s")
LONGEST_GAP_S = 600.0
_LOOPBACK = "lo"


class HostCurves:
    """For each host: the busy part of its cores, the used part of its memory, bytes per second over its network."""

    def __init__(self) -> None:
        self.curves: dict[int, dict[str, Buckets]] = {}
        self.newest: dict[int, Record] = {}
        """What a host has and uses now: cores, memory in bytes, and its processes with their share of a core."""
        self._before: dict[int, Record] = {}

    def add(self, record: Record, first_t: float) -> None:
        """Take one record; a rate is the difference to the one before."""
        host = record["rank"]
        if not 0 <= host < MOST_HOSTS:
            return
        before, self._before[host] = self._before.get(host), record
        elapsed_s = record["t"] - before["t"] if before else 0.0
        if before is None or not 0.05 < elapsed_s < LONGEST_GAP_S or _is_new(before, record):
            return
        curves = self.curves.setdefault(host, {name: Buckets(first_t, 1.0, 4096) for name in CURVES})
        cores = number(record.get("cores"), 1.0)
        busy_s = sum(_grown(before, record, name) for name in _BUSY)
        total = number(record.get("memory_total_bytes"), 0.0)
        memory = number(record.get("memory_bytes"), 0.0)
        found = {
            "cpu": min(busy_s / elapsed_s / max(cores, 1.0), 1.0),
            "memory": min(memory / total, 1.0) if total > 0 else None,
            "sent": _network(before, record, "bytes_sent") / elapsed_s,
            "received": _network(before, record, "bytes_received") / elapsed_s,
        }
        for name, value in found.items():
            if value is not None:
                curves[name].add(np.array([record["t"]]), np.array([value]))
        self.newest[host] = {
            "cores": cores,
            "memory_bytes": memory,
            "memory_total_bytes": total,
            **found,
            "processes": dict(_processes(before, record, elapsed_s)),
        }


def _processes(before: Record, now: Record, elapsed_s: float) -> Iterator[tuple[str, dict[str, float]]]:
    """By name: cores in use, and memory. Processes that this host has at most by the hundred."""
    found, earlier = now.get("processes"), before.get("processes")
    for name, one in list(found.items())[:512] if isinstance(found, dict) else ():
        past = earlier.get(name) if isinstance(earlier, dict) else None
        if isinstance(one, dict):
            past = past if isinstance(past, dict) else one
            used_s = _grown(past, one, "user_s") + _grown(past, one, "system_s")
            yield (
                str(name)[:60],
                {
                    "cores": used_s / elapsed_s,
                    "memory_bytes": number(one.get("memory_bytes"), 0.0),
                },
            )


def _network(before: Record, now: Record, what: str) -> float:
    """Over all interfaces but the loopback."""
    found, earlier = now.get("interfaces"), before.get("interfaces")
    if not isinstance(found, dict) or not isinstance(earlier, dict):
        return 0.0
    return sum(
        _grown(earlier.get(name) or {}, one, what)
        for name, one in found.items()
        if isinstance(one, dict) and isinstance(earlier.get(name) or {}, dict) and name != _LOOPBACK
    )


def _is_new(before: Record, now: Record) -> bool:
    """Whether another launcher counts, from nothing."""
    return number(now.get("cpu_idle_s"), 0.0) < number(before.get("cpu_idle_s"), 0.0)


def _grown(before: Record, now: Record, name: str) -> float:
    """By how much a counter has grown; one that begins again has not."""
    grown = number(now.get(name), 0.0) - number(before.get(name), 0.0)
    return grown if 0 < grown < 1e18 else 0.0
