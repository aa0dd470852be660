"""The replica and the comm that fit the strategy, the placement, the optimizer, the device and the world.

This is the one place that chooses where a replica's vectors live and how its updates are made.
"""

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.engine.settings import Settings, Training
from manyhands.errors import UsageError
from manyhands.placement.placed import PlacedModel
from manyhands.replica.barrier_group import BarrierGroup
from manyhands.replica.flat_model import FlatModel, lay_out_part
from manyhands.replica.gradients.factors import Factors, linear_weights
from manyhands.replica.gradients.in_advance import GradientsInAdvance
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.memory import LockFreeMemory, Memory, OpenMemory, PrivateMemory, SharedMemory
from manyhands.replica.neighbours import Neighbours
from manyhands.replica.optimizer.abilities import abilities_of, is_element_wise, runs_whole
from manyhands.replica.optimizer.clipped_path import ClippedInParts, ClippedPath
from manyhands.replica.optimizer.gates import HostsGate, LoneHostGate, PartsGate
from manyhands.replica.optimizer.undo_log import LoggedPath, UndoLog
from manyhands.replica.optimizer.updates import StepGate, UpdatePath, Updates
from manyhands.replica.optimizer.whole_path import WholePath
from manyhands.replica.part import Part
from manyhands.replica.replica import Replica
from manyhands.servers.protocol.service import Service
from manyhands.servers.worker import joining
from manyhands.servers.worker.client import Servers
from manyhands.strategies import Traits

Built = tuple[Replica, Comm, Servers | None]


def compose(
    training: Training,
    settings: Settings,
    traits: Traits,
    world: World,
    placed: PlacedModel,
    *,
    has_begun: bool,
    keeps: bool = False,
    elsewhere: Collection[int] = (),
    session: int = 0,
) -> Built:
    """All workers of the world must ask; their parameters are still as each one had them.

    `has_begun` is whether some of them have trained together before, so that servers know the parameters; a worker that
    `keeps` its part of a replica is one of those. Other sessions train the parameters whose ids are `elsewhere`.
    """
    model, optimizer, loss = training.model, training.optimizer, training.loss
    clip_norm = settings.clip_norm
    same_model(placed.shapes(model), abilities_of(optimizer).grain.value, world)
    placement = placed.enter(model, optimizer, loss, world, has_begun=has_begun, keeps=keeps)
    part = placement or Part(model, loss)
    part.elsewhere = elsewhere
    built: Built
    if traits.servers is not None:
        if placement and clip_norm is not None:
            raise UsageError(
                "clip_norm limits the norm over all parts of a replica, and each part has servers of its own; leave it "
                "out, or choose a strategy without servers"
            )
        built = joining.join(
            part,
            optimizer,
            placed.peers,
            service_of(traits, clip_norm),
            has_begun=has_begun,
            arena=world.host.arena,
            peers=placed.mesh.peers(),
            session=session,
        )
    else:
        memory, comm = _memory(part, optimizer, traits, placed.peers)
        # Without a limit the norm is taken as well, where steps that are not finite are to be left out.
        limit = math.inf if clip_norm is None and settings.skip_nonfinite else clip_norm
        around = _Surroundings(world, placed, traits, comm, limit, settings.logged, settings.seed)
        built = _replica(part, optimizer, memory, around), comm, None
    placed.settle(built[0])
    return built


def _memory(part: Part, optimizer: Optimizer, traits: Traits, peers: World) -> tuple[Memory, Comm]:
    """Where the replica's vectors live, and what sums them over the replicas."""
    device = next(part.model.parameters()).device
    on_cpu = device.type == "cpu"
    if traits.replica == "open" and not on_cpu:
        raise UsageError("this strategy averages in the memory of a host: use --device cpu")
    if traits.replica == "shared" and on_cpu and not runs_whole(optimizer):
        shared = SharedMemory if traits.lockstep else LockFreeMemory
        return shared(peers.host), peers.between_hosts()
    if (traits.topology == "native" and on_cpu) or peers.size == 1:
        comm = peers.comm
    else:
        comm = peers.scheduled(traits.topology) if on_cpu else peers.between_devices()
    pool = comm if on_cpu else None
    if traits.replica == "open":
        return OpenMemory(device, pool, Neighbours(peers.host)), comm
    return PrivateMemory(device, pool), comm


@dataclass(frozen=True)
class _Surroundings:
    """The run that a replica is part of."""

    world: World
    placed: PlacedModel
    traits: Traits
    comm: Comm
    clip_norm: float | None
    logged: bool
    seed: int

    @property
    def hosts(self) -> int:
        return len(self.world.hosts)


def _replica(part: Part, optimizer: Optimizer, memory: Memory, around: _Surroundings) -> Replica:
    """Flat vectors, the optimizer on their spans, the sum of gradients, and the path of the updates."""
    team = memory.team
    lanes = around.placed.peers.lanes if memory.is_shared else 1
    # Gradients as factors: for workers that add them up, and where they are not wanted as they come.
    takes_factors = around.hosts == 1 and team.size > 1 and around.clip_norm is None and not part.spread
    factored = linear_weights(part.model) if takes_factors else ()
    layout = lay_out_part(part, optimizer, lanes=lanes, factored=factored)
    flat = FlatModel(part, optimizer, memory, layout)
    is_logged = around.logged and team.size > 1
    updates = Updates(
        optimizer,
        layout,
        flat.params,
        allocate=lambda name: memory.state(layout.length, flat.dtype),
        # Numbers cost little to write down, and any worker may be asked for the whole state.
        common=around.placed.peers.host
        if is_logged or (team.size > 1 and is_element_wise(optimizer))
        else None,
        exact=around.world.size == 1 or not around.traits.lockstep,  # of hosts that step together all or none
    )
    log = _log(flat, updates) if is_logged else None
    gradients = GradientsInAdvance(
        flat,
        [span.index % lanes % team.size for span in layout.spans],
        team,
        factors=Factors(layout, flat.total, team) if any(place.factored for place in layout.places) else None,
        scratch=log.scratch if log else None,
    )
    return Replica(flat, gradients, _path(flat, updates, gradients, log, around), lanes=lanes)


def _path(
    flat: FlatModel, updates: Updates, gradients: Gradients, log: UndoLog | None, around: _Surroundings
) -> UpdatePath:
    """How updates are made: at once, noted in an undo log, behind which gate, and whether the gradient is limited."""
    memory, team, host = flat.memory, flat.memory.team, around.placed.peers.host
    gate = StepGate(gradients, team)
    if around.logged and around.hosts > 1 and memory.steps_together:
        gate = HostsGate(gradients, team) if team.size > 1 else LoneHostGate(gradients, team)
    parts = around.placed.barrier_group(around.world) if around.logged and memory.is_shared else None
    if parts:
        gate = PartsGate(gradients, team, parts, gate)
    path = UpdatePath(updates, gradients, gate)
    if runs_whole(flat.optimizer):
        is_common = abilities_of(flat.optimizer).draws and around.placed.peers.size > 1
        path = WholePath(updates, gradients, gate, flat, around.seed if is_common else None)
    if log:
        group = parts or BarrierGroup(host, tuple(range(team.size)))
        path = LoggedPath(updates, gradients, gate, log, team, group)
    if around.clip_norm is None:
        return path
    clipped = ClippedInParts if parts else ClippedPath
    agree = around.comm.copy_ if around.traits.synchronous else None
    return clipped(path, around.clip_norm, flat, gradients, team, agree)


def _log(flat: FlatModel, updates: Updates) -> UndoLog:
    """The undo log of a team, of all that an update changes."""
    changed = [flat.params, *updates.vectors.values()]
    team = flat.memory.team
    return UndoLog(flat.layout, changed, updates.numbers, team.allocate, owners=team.size, mine=team.index)


def service_of(traits: Traits, clip_norm: float | None) -> Service:
    """What the strategy asks of the servers."""
    if traits.servers is None:
        raise UsageError("the strategy uses no servers; leave --servers out")
    return replace(traits.servers, clip_norm=clip_norm)


def same_model(shapes: list[Any], grain: str, world: World) -> None:
    """Workers that share memory must mean the same by it, and divide the optimizer's work alike."""
    if not shapes:
        raise UsageError("the model has no parameters; there is nothing to train")
    digests = [int(row[0]) for row in world.exchange([float(zlib.crc32(repr((shapes, grain)).encode()))])]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UsageError(
                f"worker {rank} has another model or optimizer than worker 0; build the same ones on all workers"
            )
