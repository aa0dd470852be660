"""The replica and the comm that fit the strategy, the placement, the optimizer, the device and the world.

This is the one place that chooses where a replica's vectors live and how its updates are made.
"""

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.cluster.worker.world import World
from manyhands.comm import codecs
from manyhands.comm.codecs import Codec
from manyhands.comm.comm import Comm
from manyhands.comm.row_links import RowLinks
from manyhands.engine.settings import Settings, Training
from manyhands.errors import UsageError
from manyhands.placement.placed import PlacedModel
from manyhands.replica.barrier_group import BarrierGroup
from manyhands.replica.flat_model import FlatModel, lay_out_part
from manyhands.replica.gradients.error_memory import ErrorMemory
from manyhands.replica.gradients.factors import Factors, large_weights, linear_weights
from manyhands.replica.gradients.factors_between import FactorsBetween
from manyhands.replica.gradients.in_advance import GradientsInAdvance
from manyhands.replica.gradients.same_products import sign_of_products
from manyhands.replica.layout import Layout
from manyhands.replica.memory import LockFreeMemory, Memory, OpenMemory, PrivateMemory, SharedMemory, Team
from manyhands.replica.neighbours import Neighbours
from manyhands.replica.optimizer.abilities import abilities_of, is_element_wise, runs_whole
from manyhands.replica.optimizer.clipped_path import ClippedInParts, ClippedPath
from manyhands.replica.optimizer.gates import HostsGate, LoneHostGate, PartsGate
from manyhands.replica.optimizer.state_table import CommonMemory
from manyhands.replica.optimizer.undo_log import LeftPath, LoggedPath, UndoLog
from manyhands.replica.optimizer.updates import StepGate, UpdatePath, Updates
from manyhands.replica.optimizer.whole_path import WholePath
from manyhands.replica.part import Part
from manyhands.replica.part_memory import LeftMemory, PartMemory
from manyhands.replica.part_place import PARTS, PartPlace
from manyhands.replica.replica import Replica
from manyhands.replica.state.part_copies import PartCopies, take_left
from manyhands.replica.state.step_copies import StepCopies
from manyhands.servers.protocol.service import Service
from manyhands.servers.worker import joining
from manyhands.servers.worker.client import Servers
from manyhands.strategies import Traits

Built = tuple[Replica, Comm, Servers | None]


def divide(
    training: Training,
    world: World,
    placed: PlacedModel,
    *,
    has_begun: bool,
    keeps: bool = False,
    elsewhere: Collection[int] = (),
) -> Part:
    """This worker's part of the model; all workers of the world must ask.

    `has_begun` is whether some of them have trained together before; a worker that `keeps` its part of a replica is one
    of those. Other sessions train the parameters whose ids are `elsewhere`.
    """
    model, optimizer, loss = training.model, training.optimizer, training.loss
    same_model(placed.shapes(model), abilities_of(optimizer).grain.value, world)
    placement = placed.enter(model, optimizer, loss, world, has_begun=has_begun, keeps=keeps)
    part = placement or Part(model, loss)
    part.elsewhere = elsewhere
    return part


def compose(
    part: Part,
    training: Training,
    settings: Settings,
    traits: Traits,
    world: World,
    placed: PlacedModel,
    *,
    has_begun: bool,
    session: int = 0,
) -> Built:
    """All workers of the world must ask; their parameters are still as each one had them."""
    optimizer, clip_norm = training.optimizer, settings.clip_norm
    built: Built
    if traits.servers is not None:
        if part.spread and clip_norm is not None:
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
        memory, comm = _memory(part, optimizer, traits, placed.peers, codecs.parse(settings.codec))
        home: CommonMemory = placed.peers.host
        if settings.logged and part.spread and traits.logs_parts:
            place = PartPlace(world.host.arena.fd, session, placed.part_number)
            memory = PartMemory(placed.peers.host, place, world.rank_info.generation)
            home = memory.team
        around = _Surroundings(world, placed, traits, comm, _limit(settings), settings, home)
        built = _replica(part, optimizer, memory, around), comm, None
    placed.settle(built[0])
    return built


def _limit(settings: Settings) -> float | None:
    """Of the norm, which is taken without a limit as well where steps that are not finite are to be left out."""
    return math.inf if settings.clip_norm is None and settings.skip_nonfinite else settings.clip_norm


def _memory(
    part: Part, optimizer: Optimizer, traits: Traits, peers: World, codec: Codec
) -> tuple[Memory, Comm]:
    """Where the replica's vectors live, and what sums them over the replicas."""
    device = next(part.model.parameters()).device
    on_cpu = device.type == "cpu"
    if traits.replica == "open" and not on_cpu:
        raise UsageError("this strategy averages in the memory of a host: use --device cpu")
    if traits.replica == "shared" and on_cpu and not runs_whole(optimizer):
        shared = SharedMemory if traits.lockstep else LockFreeMemory
        return shared(peers.host), peers.coded(codec)
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
    settings: Settings
    home: CommonMemory
    """Where other processes find what they need to go on with the replica."""

    @property
    def hosts(self) -> int:
        return len(self.world.hosts)

    @property
    def codec(self) -> Codec:
        """By which gradients travel between hosts."""
        return codecs.parse(self.settings.codec)

    @property
    def logged(self) -> bool:
        return self.settings.logged


@dataclass(frozen=True)
class _ReplicaParts:
    """What a replica is made of, whatever the path of its updates."""

    flat: FlatModel
    updates: Updates
    log: UndoLog | None
    gradients: GradientsInAdvance
    copies: StepCopies | None
    errors: ErrorMemory | None


def _make(
    part: Part, optimizer: Optimizer, memory: Memory, around: _Surroundings, lanes: int
) -> _ReplicaParts:
    """Flat vectors, the optimizer on their spans, the sum of gradients: always asking for memory in this order."""
    team = memory.team
    links = around.placed.peers.row_links() if memory.steps_together and not part.spread else None
    # Gradients as factors: for workers that add them up, and where they are not wanted as they come. Between hosts they
    # are fewer bytes; all hosts must make the same bits of them.
    takes_factors = around.hosts == 1 and team.size > 1 and around.clip_norm is None and not part.spread
    takes_factors |= links is not None and _multiply_alike(around.world)
    factored = linear_weights(part.model) if takes_factors else ()
    layout = lay_out_part(part, optimizer, lanes=lanes, factored=factored)
    flat = FlatModel(part, optimizer, memory, layout)
    is_logged = around.logged and (team.size > 1 or memory.outlives)
    updates = Updates(
        optimizer,
        layout,
        flat.params,
        allocate=lambda name: memory.state(layout.length, flat.dtype),
        # Numbers cost little to write down, and any worker may be asked for the whole state.
        common=around.home if is_logged or (team.size > 1 and is_element_wise(optimizer)) else None,
        exact=around.world.size == 1 or not around.traits.lockstep,  # of hosts that step together all or none
    )
    log = _log(flat, updates) if is_logged else None
    # Its gradients are nothing but what others may have to finish. Slices of a layer are no whole product.
    is_lone = memory.outlives and team.size == 1 and around.placed.mesh.ways == 1
    gradients = GradientsInAdvance(
        flat,
        [span.index % lanes % team.size for span in layout.spans],
        team,
        factors=_factors(layout, flat.total, team, links, around.codec),
        made_in_place=large_weights(flat.model, flat.parameters) if is_lone else (),
        scratch=log.scratch if log else None,
    )
    copies = None
    if memory.outlives:
        copies = StepCopies(part.buffers, optimizer, team.allocate, workers=team.size, mine=team.index)
    errors = ErrorMemory(layout, team) if around.codec.keeps_error and around.hosts > 1 else None
    return _ReplicaParts(flat, updates, log, gradients, copies, errors)


def _factors(
    layout: Layout, total: Tensor, team: Team, links: RowLinks | None, codec: Codec
) -> Factors | None:
    """Of the layers that are large enough, if any."""
    if not any(place.factored for place in layout.places):
        return None
    if links is None:
        return Factors(layout, total, team)
    many = 1 << 20  # elements, for which a codec's message is about in proportion
    return FactorsBetween(layout, total, team, links, codec.size_bytes(many) / (4 * many))


def _multiply_alike(world: World) -> bool:
    """Whether all workers make the same bits of the same factors."""
    return len({row[0] for row in world.exchange([float(sign_of_products())])}) == 1


def _replica(part: Part, optimizer: Optimizer, memory: Memory, around: _Surroundings) -> Replica:
    lanes = around.placed.peers.lanes if memory.is_shared else 1
    made = _make(part, optimizer, memory, around, lanes)
    path = _path(made, around)
    return Replica(made.flat, made.gradients, path, lanes=lanes, copies=made.copies, errors=made.errors)


def _path(made: _ReplicaParts, around: _Surroundings) -> UpdatePath:
    """How updates are made: at once, noted in an undo log, behind which gate, and whether the gradient is limited."""
    flat, updates, gradients = made.flat, made.updates, made.gradients
    memory, team, host = flat.memory, flat.memory.team, around.placed.peers.host
    gate = StepGate(gradients, team)
    if around.logged and around.hosts > 1 and memory.steps_together:
        gate = HostsGate(gradients, team) if team.size > 1 else LoneHostGate(gradients, team)
    parts = around.placed.barrier_group(around.world) if around.logged and memory.is_shared else None
    if parts:
        gate = PartsGate(gradients, team, parts, gate, made.copies)
    path = UpdatePath(updates, gradients, gate)
    if runs_whole(flat.optimizer):
        is_common = abilities_of(flat.optimizer).draws and around.placed.peers.size > 1
        path = WholePath(updates, gradients, gate, flat, around.settings.seed if is_common else None)
    if made.log:
        group = parts or BarrierGroup(host, tuple(range(team.size)))
        path = LoggedPath(updates, gradients, gate, made.log, team, group)
    if around.clip_norm is None:
        return path
    clipped = ClippedInParts if parts else ClippedPath
    agree = around.comm.copy_ if around.traits.synchronous else None
    return clipped(path, around.clip_norm, flat, gradients, team, agree)


def revive(
    part: Part,
    training: Training,
    settings: Settings,
    traits: Traits,
    world: World,
    placed: PlacedModel,
    *,
    place: PartPlace,
) -> Replica:
    """The replica of the workers that had this part, who are all gone: after the last of its steps that counts."""
    optimizer, before = training.optimizer, world.rank_info.generation
    if not traits.logs_parts:
        around = _Surroundings(world, placed, traits, Comm(), None, Settings(), placed.peers.host)
        found = _replica(part, optimizer, PrivateMemory(torch.device("cpu")), around)
        take_left(found, place, before)
        found.let_go()
        return found
    memory = LeftMemory(place, before)
    around = _Surroundings(world, placed, traits, Comm(), _limit(settings), settings, memory.team)
    made = _make(part, optimizer, memory, around, memory.team.size)
    gate = StepGate(made.gradients, memory.team)
    assert made.log
    assert made.copies
    path: UpdatePath = LeftPath(made.updates, made.gradients, gate, made.log, memory.steps)
    if around.clip_norm is not None:
        path = ClippedInParts(path, around.clip_norm, made.flat, made.gradients, memory.team, None)
    replica = Replica(made.flat, made.gradients, path, lanes=memory.team.size, copies=made.copies)
    made.copies.take_settings(memory.steps)
    replica.recover(range(memory.team.size))
    made.copies.put_back(memory.steps)
    return replica


def copies_of(
    replica: Replica, settings: Settings, traits: Traits, world: World, placed: PlacedModel, place: PartPlace
) -> PartCopies | None:
    """The copies of this worker's part that outlive it, where an undo log is not enough for that."""
    is_kept = settings.logged and traits.parts_outlive and not traits.logs_parts
    if not (is_kept and replica.part.spread and len(world.hosts) == 1 and world.size <= PARTS):
        return None
    return PartCopies(replica, place, world.rank_info.generation)


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
