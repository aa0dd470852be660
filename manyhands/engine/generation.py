"""What a worker has for one generation: as long as the members of the run do not change."""

from dataclasses import dataclass

import torch

from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.comm.transports.counters import CounterTable
from manyhands.engine.build import Built
from manyhands.engine.feeds import MOST
from manyhands.engine.same_data import STEPS
from manyhands.placement.placed import PlacedModel
from manyhands.replica.replica import Replica
from manyhands.replica.state.part_copies import PartCopies
from manyhands.servers.worker.client import Servers
from manyhands.servers.worker.fleet import DirectFleet, Fleet


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The world, and what was built for it."""

    world: World
    replica: Replica
    comm: Comm
    servers: Servers | None
    fleet: Fleet | None
    """The servers as the strategy sees them."""
    part_copies: PartCopies | None
    """Those of this worker's part that outlive it."""
    used: CounterTable | None
    """Rounds of each stream whose effect is in the host's memory, where workers do not step together; and
    signs of their first batches."""

    # Facts that every step asks for.
    is_whole: bool
    """Whether every worker has all of the model."""
    counts: bool
    """Of workers that compute the same samples, one counts them."""
    is_own: bool
    """Whether this worker alone has its replica, all of it."""
    is_alone: bool
    """Whether there is no other worker."""
    computes_in_place: bool
    """Whether the parameters are the memory that servers update, and no copy of it."""
    replicas: int
    one_host: bool
    device: torch.device | None
    """To which batches are moved; None where they stay on the CPU."""
    feeds: int
    """Different batches in a step."""
    copies: int
    """Workers that work on the same samples."""
    members: int
    """Workers of one replica."""


def _fleet(comm: Comm, servers: Servers | None) -> Fleet | None:
    if comm.servers is None:
        return None
    if servers is not None and comm.servers is servers:
        return DirectFleet(servers, comm)
    return Fleet(comm.servers, comm)


def begin(
    world: World,
    placed: PlacedModel,
    built: Built,
    *,
    lockstep: bool,
    part_copies: PartCopies | None,
) -> Generation:
    replica, comm, servers = built
    device = replica.params.device
    # With elastic servers, the servers know what each worker has used.
    counted_elsewhere = lockstep or (servers is not None and servers.is_elastic)
    return Generation(
        world=world,
        replica=replica,
        comm=comm,
        servers=servers,
        fleet=_fleet(comm, servers),
        part_copies=part_copies,
        used=None if counted_elsewhere else world.host.table(MOST + STEPS + 1),
        is_whole=placed.is_whole,
        counts=placed.counts,
        is_own=replica.is_own,
        is_alone=world.size == 1,
        computes_in_place=servers is not None and servers.parameters.in_place,
        replicas=placed.peers.size,
        one_host=len(world.hosts) == 1,
        device=device if device.type != "cpu" else None,
        feeds=placed.mesh.feeds,
        copies=placed.mesh.copies,
        members=placed.mesh.members,
    )
