"""Who makes a step together where replicas are in parts: not only those who have the same part."""

from dataclasses import dataclass

from manyhands.comm.transports.host import Host


@dataclass(frozen=True)
class BarrierGroup:
    """All workers of a host, of which some have this part of the model; `own[i]` is where the i-th of those stands.

    No part is updated before everyone has all gradients: so the step counts for all parts or for none, whoever dies.
    """

    host: Host
    own: tuple[int, ...]
