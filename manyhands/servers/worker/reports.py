"""What the servers of a run have counted."""

from collections import Counter
from typing import Any

import msgspec

from manyhands.cluster.worker.world import World
from manyhands.servers.protocol.messages import ServerReport
from manyhands.servers.worker.client import Servers


def report(line: Servers | None, world: World) -> list[ServerReport]:
    """What the servers have counted, the same on all workers."""
    found = line.reports() if line is not None and line.leads else []
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
