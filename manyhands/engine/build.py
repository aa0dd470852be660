"""The replica and the comm that fit the strategy, the placement, the optimizer, the device and the world."""

import zlib
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.errors import UsageError
from manyhands.placement.placed import PlacedModel
from manyhands.replica.neighbours import Neighbours
from manyhands.replica.optimizer.abilities import needs_closure
from manyhands.replica.replica import Loss, Replica
from manyhands.servers.protocol.service import Service
from manyhands.servers.worker import joining
from manyhands.servers.worker.client import Servers
from manyhands.strategies import Strategy, Traits


def compose(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    world: World,
    strategy: Strategy,
    placed: PlacedModel,
    clip_norm: float | None,
    *,
    journaled: bool,
    has_begun: bool,
    keeps: bool = False,
) -> tuple[Replica, Comm, Servers | None]:
    """All workers of the world must ask; their parameters are still as each one had them.

    `has_begun` is whether some of them have trained together before, so that servers know the parameters; whoever
    `keeps` its part of a replica is one of those.
    """
    same_model(placed.shapes(model), world)
    part = placed.enter(model, optimizer, loss, world, has_begun=has_begun, keeps=keeps)
    device = next(model.parameters()).device.type
    peers = placed.peers
    traits = strategy.traits
    if traits.servers is not None:
        if part and clip_norm is not None:
            raise UsageError(
                "clip_norm limits the norm over all parts of a replica, and each part has servers of its own; leave it "
                "out, or choose a strategy without servers"
            )
        replica, comm, line = joining.join(
            model,
            optimizer,
            loss,
            peers,
            service_of(traits, clip_norm),
            has_begun=has_begun,
            arena=world.host.arena,
            part=part,
            peers=placed.mesh.peers(),
        )
        placed.settle(replica)
        return replica, comm, line
    shared = traits.replica == "shared" and device == "cpu" and not needs_closure(optimizer)
    if shared:
        host, lanes, comm = peers.host, peers.lanes, peers.between_hosts()
    else:
        host, lanes = None, 1
        if (traits.topology == "native" and device == "cpu") or peers.size == 1:
            comm = peers.comm
        elif device != "cpu":
            comm = peers.between_devices()
        else:
            comm = peers.scheduled(traits.topology)
    if traits.replica == "open" and device != "cpu":
        raise UsageError("this strategy averages in the memory of a host: use --device cpu")
    replica = Replica(
        model,
        optimizer,
        loss,
        host=host,
        neighbours=Neighbours(peers.host) if traits.replica == "open" else None,
        together=traits.lockstep,
        factored=len(world.hosts) == 1,
        journaled=journaled,
        gated=journaled and len(world.hosts) > 1,
        exact=world.size == 1 or not traits.lockstep,  # of hosts that step together all or none
        lanes=lanes,
        clip_norm=clip_norm,
        agree=comm.copy_ if traits.synchronous else None,
        memory=comm if device == "cpu" and not shared else None,
        part=part,
        barrier_group=placed.barrier_group(world) if journaled and shared else None,
    )
    placed.settle(replica)
    return replica, comm, None


def service_of(traits: Traits, clip_norm: float | None) -> Service:
    """What the strategy asks of the servers."""
    if traits.servers is None:
        raise UsageError("the strategy uses no servers; leave --servers out")
    return replace(traits.servers, clip_norm=clip_norm)


def same_model(shapes: list[Any], world: World) -> None:
    """Workers that share memory must mean the same by it."""
    if not shapes:
        raise UsageError("the model has no parameters; there is nothing to train")
    digests = [int(row[0]) for row in world.exchange([float(zlib.crc32(repr(shapes).encode()))])]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UsageError(
                f"worker {rank} has another model than worker 0; build the same one on all workers"
            )
