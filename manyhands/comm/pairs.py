"""Two replicas exchange vectors over point-to-point messages."""

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.transport import Transport


def swap(transport: Transport, peer: int, vector: Tensor) -> Tensor:
    """Give the peer a vector and get its own, of the same length; alone with oneself, a copy."""
    if peer == transport.rank:
        return vector.clone()
    theirs = torch.empty_like(vector)
    give, take = transport.send(peer, vector), transport.receive(peer, theirs)
    take.wait()
    give.wait()
    telemetry.count("bytes_sent", vector.nbytes)
    telemetry.count("bytes_received", vector.nbytes)
    return theirs
