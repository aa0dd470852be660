"""What the servers of a run have counted."""

from collections import Counter
from typing import Any

import msgspec

from manyhands.cluster.worker.world import World
from manyhands.servers.protocol.messages import AskReport, ServerReport
from manyhands.servers.worker.client import Servers


def fetch(servers: Servers) -> list[ServerReport]:
    """What each server of this worker's group has counted."""
    return servers.connections.ask(lambda number: AskReport(number=number), ServerReport)


def report(servers: Servers | None, world: World) -> list[ServerReport]:
    """What the servers have counted, the same on all workers."""
    found = fetch(servers) if servers is not None and servers.leads else []
    everyone = world.gather(msgspec.json.encode(found))
    return [one for found in everyone for one in msgspec.json.decode(found, type=list[ServerReport])]


def staleness(reports: list[ServerReport]) -> dict[str, Any]:
    """How many updates by others came between reading parameters and applying the gradient computed on them."""
    counts: Counter[int] = Counter()
    for one in reports:
        counts.update(one.staleness)
    updates = counts.total()
    return {
        "mean": round(sum(stale * times for stale, times in counts.items()) / updates, 3) if updates else 0.0,
        "max": max(counts, default=0),
        "histogram": {str(stale): counts[stale] for stale in sorted(counts)},
    }
