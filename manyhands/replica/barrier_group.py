"""Who makes a step together where replicas are in parts: not only those who have the same part."""

from dataclasses import dataclass

from manyhands.comm.transports.host import Host


@dataclass(frozen=True)
class BarrierGroup:
    """All workers of a host, of which some have this part of the model; `own[i]` is where the i-th of those stands.

    No worker updates its part before all workers have all gradients: so the step counts for all parts or for none,
    whichever worker dies.
    """

    host: Host
    own: tuple[int, ...]
