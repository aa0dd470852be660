"""The forward and backward pass of one worker under a placement: what it computes, exchanges inside, and waits.

whole       C = a + c·b CPU seconds, wall κ·C, measured with all processes of the host running
pipeline    each stage has its share of C for each microbatch; the schedule's own table is replayed
tensor      layers that can be divided cost C ÷ ways; activations are added up once per divided layer
sharded     each layer's parameters come twice and its gradients go once through host memory or the network
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any

from manyhands.placement.mesh import Mesh
from manyhands.placement.pipeline.balance import Costs, balanced
from manyhands.placement.pipeline.timetable import BACKWARD, FORWARD, Action, table
from manyhands.planner.amounts import Amount
from manyhands.planner.facts import LayerFacts, ModelFacts


@dataclass(frozen=True)
class PassCost:
    """In wall seconds."""

    compute_s: Amount
    exchange_s: Amount = 0.0
    waiting_s: Amount = 0.0

    @property
    def wall_s(self) -> Amount:
        return self.compute_s + self.exchange_s + self.waiting_s


@dataclass(frozen=True)
class InnerLink:
    """What the workers of one replica exchange costs: through memory, or between hosts."""

    latency_s: Amount
    s_per_byte: Amount


def pass_cost(
    model: ModelFacts,
    mesh: Mesh,
    placement: Any,
    samples: int,
    whole_s: Any,
    inside: InnerLink,
    ahead: float = 0.0,
) -> PassCost:
    """`whole_s(samples)` is the wall time of a pass of the whole model on one worker; `ahead` is how much longer than
    a worker's own pass the slowest of a replica's workers takes."""
    cost = PassCost(whole_s(samples))
    if mesh.members == 1:
        return cost
    if mesh.ways > 1:
        cost = _divided(model, mesh.ways, samples, cost, inside)
    if mesh.stages > 1:
        cost = _staged(model, mesh, placement, samples, whole_s, cost, inside)
    meetings = 1
    if mesh.ways > 1 or mesh.shards > 1:
        meetings = max(1, len(model.layers))
    if mesh.shards > 1:
        share = (mesh.shards - 1) / mesh.shards
        fetched = 3 * 2 * share * model.bytes * inside.s_per_byte + 3 * meetings * inside.latency_s
        cost = PassCost(cost.compute_s, cost.exchange_s + fetched, cost.waiting_s)
    # Layers differ between workers as passes do, and √layers times as much; handshake, gate and commit come on top.
    waiting = cost.compute_s * ahead * sqrt(meetings) + 3 * inside.latency_s
    return PassCost(cost.compute_s, cost.exchange_s, cost.waiting_s + waiting)


def _divided(model: ModelFacts, ways: int, samples: int, cost: PassCost, inside: InnerLink) -> PassCost:
    parts = [layer for layer in model.layers if layer.divisible]
    share = sum(layer.share for layer in parts)
    travels = sum(layer.output_bytes for layer in parts) * samples
    exchange = 2 * (ways - 1) / ways * travels * inside.s_per_byte + 2 * len(parts) * inside.latency_s
    return PassCost(cost.compute_s * (1 - share + share / ways), cost.exchange_s + exchange, cost.waiting_s)


def _staged(
    model: ModelFacts,
    mesh: Mesh,
    placement: Any,
    samples: int,
    whole_s: Any,
    divided: PassCost,
    inside: InnerLink,
) -> PassCost:
    micros, depth = placement.microbatches, getattr(placement, "depth", None) or _depth(placement)
    shares, crossing_bytes = stages_of(model.layers, mesh.stages * depth)
    # Every microbatch pays for a pass of its own; what tensors divide of it is divided here as well.
    smaller = divided.compute_s / whole_s(samples)
    micro_s = whole_s(max(1, samples / micros)) * smaller
    hop_bytes = max(crossing_bytes, default=0.0) * max(1, samples / micros)
    hop_s = inside.latency_s + hop_bytes * inside.s_per_byte
    length = _relative(placement.schedule, mesh.stages, depth, micros, shares, model.forward_share)
    # The busiest worker of the pipeline computes; the rest of the length is the bubble.
    busiest = max(sum(shares[worker :: mesh.stages]) for worker in range(mesh.stages)) * micros
    hops = (
        2 * (mesh.stages * depth - 1) * hop_s
    )  # those of one microbatch; others follow while workers compute
    return PassCost(
        micro_s * busiest,
        divided.exchange_s / mesh.stages + hops,
        micro_s * (length - busiest),
    )


def _depth(placement: Any) -> int:
    return int(placement.chunks) if placement.schedule == "interleaved" else 1


@lru_cache
def stages_of(layers: tuple[LayerFacts, ...], stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The share of each stage as the placement cuts them, and the bytes per sample that cross each cut."""
    costs = Costs(
        seconds=[layer.share for layer in layers],
        crossing_bytes=[int(layer.output_bytes) for layer in layers],
        allowed=[True] * len(layers),
        trained=[layer.parameters > 0 for layer in layers],
    )
    cuts = balanced(costs, stages)
    if cuts is None:
        return (1 / stages,) * stages, ()
    edges = [0, *cuts, len(layers)]
    shares = [sum(layer.share for layer in layers[start:stop]) for start, stop in itertools.pairwise(edges)]
    return tuple(shares), tuple(layers[cut - 1].output_bytes for cut in cuts)


@lru_cache
def _relative(
    schedule: str, workers: int, depth: int, micros: int, shares: tuple[float, ...], forward: float
) -> float:
    """How long a step of the pipeline is, in passes of the whole model over one microbatch."""
    order = table(schedule, workers, depth, micros)
    lengths = {FORWARD: forward, BACKWARD: 1 - forward}
    if any(action.kind not in lengths for actions in order for action in actions):
        lengths = {FORWARD: forward, BACKWARD: (1 - forward) / 2}
    return replay(order, shares, lengths, rest=(1 - forward) / 2)


def replay(
    order: tuple[tuple[Action, ...], ...], shares: tuple[float, ...], lengths: dict[str, float], rest: float
) -> float:
    """When the last worker is done: each does its actions in order, as soon as their inputs are there."""
    workers, last = len(order), len(shares) - 1
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * workers, [0] * workers
    while any(place < len(actions) for place, actions in zip(at, order, strict=True)):
        for worker, actions in enumerate(order):
            while at[worker] < len(actions):
                action = actions[at[worker]]
                stage = action.chunk * workers + worker
                needs = _needed(action, stage, last)
                if needs is not None and needs not in done:
                    break
                begin = max(free[worker], done[needs] if needs else 0.0)
                free[worker] = begin + shares[stage] * lengths.get(action.kind, rest)
                done[action.kind, stage, action.micro] = free[worker]
                at[worker] += 1
    return max(free)


def _needed(action: Action, stage: int, last: int) -> tuple[str, int, int] | None:
    if action.kind == FORWARD:
        return (FORWARD, stage - 1, action.micro) if stage else None
    if action.kind == BACKWARD:
        return (BACKWARD, stage + 1, action.micro) if stage < last else (FORWARD, stage, action.micro)
    return (BACKWARD, stage, action.micro)
