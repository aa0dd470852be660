"""What a way needs of each host's memory. A plan that does not fit is never made.

    parameters + optimizer state, once for each replica on the host
    + p · (gradients + A₀ + A₁ · b + process + what the strategy keeps) + servers

p workers; under a placement each has its part of parameters, state and gradients, and a part of the activations.
"""

from collections.abc import Sequence

from manyhands.planner.conditions import kind_of
from manyhands.planner.facts import Facts, ModelFacts
from manyhands.planner.roles import role_of
from manyhands.planner.ways import HostSplit, Way

ROOM = 0.95
"""Of a host's memory that a plan may need: estimates are a few percent off, and the system needs some."""


def memory_bytes(facts: Facts, way: Way, kept: Sequence[float]) -> dict[str, float]:
    """Per host, by kind; `kept` is what the strategy keeps on a worker, by kind."""
    return {
        host.kind: _of_host(facts, way, host, vectors, has_servers=place == 0)
        for place, (host, vectors) in enumerate(zip(way.hosts, kept, strict=True))
    }


def _of_host(facts: Facts, way: Way, host: HostSplit, kept: float, *, has_servers: bool) -> float:
    model, mesh, traits = facts.model, way.mesh, way.traits
    process = kind_of(facts.cluster, host.kind).host.process_bytes
    part = model.bytes / mesh.members
    state = model.state_bytes / mesh.members
    role = role_of(traits, way.workers, way.host_count, facts.batch, divisible=model.divisible_optimizer)
    parts_here = min(host.processes, mesh.members)
    replicas = parts_here if role.shares_replica else host.processes
    each = part + _activations(model, way, facts.batch) + process + kept
    need = host.processes * each
    if traits.servers is None:
        states = host.processes if role.shares_replica and not traits.lockstep else replicas
        return need + replicas * part + states * state
    if has_servers:
        need += model.bytes + model.state_bytes + way.servers * process
    # On the servers' host the model's parameters are the memory that the servers update.
    copies = 0 if has_servers and not traits.servers.rule.fetches else host.processes
    return need + copies * part


def _activations(model: ModelFacts, way: Way, batch: int) -> float:
    """Of a worker's pass: a stage holds its part for as many microbatches as are under way."""
    whole = model.activation_bytes + model.sample_activation_bytes * batch
    mesh = way.mesh
    if mesh.stages > 1:
        micros = max(1, getattr(way.placed, "microbatches", 1))
        under_way = min(1.0, (mesh.stages + 1) / micros)
        whole = whole / mesh.stages * max(under_way, 1 / micros)
    return whole / mesh.ways


def misfit(facts: Facts, way: Way, need: dict[str, float]) -> str:
    """Why the way does not fit, with the numbers; empty where it does."""
    for host in way.hosts:
        has = kind_of(facts.cluster, host.kind).host.memory_bytes
        if need[host.kind] > has * ROOM:
            return f"needs {need[host.kind] / 1e9:.1f} GB on a host of kind {host.kind}, which has {has / 1e9:.1f} GB"
    return ""
