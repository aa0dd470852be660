"""What the host uses, where no launcher of ours records it: its first worker does, beside its own records."""

import os
from typing import Any

from manyhands import telemetry
from manyhands.cluster.launcher.host_sampler import HostSampler
from manyhands.cluster.launchers import local
from manyhands.engine.engine import Engine


def begin(engine: Engine) -> None:
    """As long as this worker writes records."""
    out, world = engine.settings.out, engine.world
    # Our launcher does it itself; and a server, or a worker that joins, has no host here.
    host: Any = getattr(world, "host", None)
    if out is None or host is None or local.LAUNCHER_PID in os.environ or host.ranks[0] != world.rank:
        return
    number = next(index for index, ranks in enumerate(world.hosts) if world.rank in ranks)
    pids = {f"worker {rank}": pid for rank, pid in host.process_ids.items()}
    telemetry.accompany(HostSampler(out, number, lambda: pids))
