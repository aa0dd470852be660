"""What one way meets on given hosts: every coefficient of the price, for one kind of host, as numbers or as draws.

Compute, all processes of a host running: C = a + c·b CPU seconds, wall = κ·C. Threads of hosts that are emulated on one
machine, or more threads than cores, share the cores: κ grows by threads ÷ cores. On a machine that is busy with other
things a process that wakes up waits for its turn: a meeting takes a slice for each process that is ahead. Where all
cores of a host compute, a byte that is sent while a pass goes on takes its γ CPU seconds from it; where one is idle, it
costs the pass nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from manyhands.planner.amounts import Amount, later
from manyhands.planner.collective_cost import demand_of, native_ring, seconds
from manyhands.planner.facts import (
    ClusterFacts,
    Estimate,
    Facts,
    HostFacts,
    HostsOfKind,
    LinkFacts,
    SplitFacts,
)
from manyhands.planner.operations import Scope
from manyhands.planner.passes import InnerLink, PassCost, pass_cost
from manyhands.planner.record import Recorded, record
from manyhands.planner.roles import Role, SpanFacts, role_of, spans_of
from manyhands.planner.stragglers import slowest
from manyhands.planner.ways import HostSplit, Way
from manyhands.servers.protocol.service import Service

PARAMETER_BYTES = 4

SLICE_S = 1.5e-3
"""That a scheduler leaves a process on a core. Without it strategies that meet often were predicted up to 2.8 times too
fast on 2 cores with a load of 20 from elsewhere, with it 2.0 times; on an idle machine nothing is ahead."""

MEMORY_BOUND = 1.3
"""κ · threads up to which a pass waits for the host's memory, and not for a core."""

MAILBOX_BYTES = 1 << 20
"""That a worker writes before its peer must have read: the slots of `comm/transports/mailbox.py`."""

Pick = Callable[[Estimate], Any]


def best(estimate: Estimate) -> float:
    return estimate.value


def drawn(estimate: Estimate) -> Any:
    """All draws at once."""
    return np.array(estimate.draws) if estimate.draws else estimate.value


@dataclass(frozen=True)
class LinkCost:
    """Of messages between hosts, as numbers or draws."""

    latency_s: Amount = 0.0
    s_per_byte: Amount = 0.0
    both_ways: Amount = 1.0
    cpu_s_per_byte: Amount = 0.0
    sharing: float = 1.0
    """Exchanges that go over it at the same time."""

    @property
    def busy_s_per_byte(self) -> Amount:
        """When a host sends and receives, and the others do."""
        return self.s_per_byte * self.both_ways * self.sharing


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """For the workers of one kind of host."""

    way: Way
    role: Role
    spans: SpanFacts
    recorded: Recorded
    passing: PassCost
    wall_per_cpu: Amount
    update_s: Amount
    """Wall seconds per byte of parameters that the optimizer updates."""
    add_s: Amount
    """Wall seconds per byte that is added to a sum in the host's memory."""
    touch_s: Amount
    """Wall seconds per byte of a vector that is read or written."""
    meeting_s: Amount
    session_s: Amount
    link: LinkCost
    jitter: tuple[float, ...] = ()
    cores: float = 1.0
    """Per worker."""
    threads: int = 1
    crowding: float = 1.0
    """Wall seconds ÷ those without other hosts on the same machine."""

    @cached_property
    def service(self) -> Service | None:
        return self.way.traits.servers

    @cached_property
    def shared_add_s(self) -> Amount:
        """Of the gradients of a pass that go into the host's one sum; the owner adds its own as it updates."""
        others = self.role.neighbours - 1
        if not self.role.shares_replica or not others:
            return 0.0
        return self.spans.bytes * others / self.role.neighbours * self.add_s

    def link_s(self, size_bytes: float) -> Amount:
        """How long a sum of so many bytes keeps the link busy."""
        demand = self._demand
        return (demand.busiest * self.link.busy_s_per_byte + demand.added * self._moving_s) * size_bytes

    def sum_s(self, size_bytes: float, scope: Scope = "replicas") -> Amount:
        """A sum over the replicas from its beginning, when all are there, to its end."""
        role, total = self.role, 0.0
        named = self.way.traits.topology != "native"
        if not role.shares_replica and role.neighbours > 1 and (not named or scope != "replicas"):
            # In place: each worker adds up its part of all rows, and writes the sum to all.
            share = 2 * (role.neighbours - 1) / role.neighbours
            total = 2 * self.meeting_s + share * size_bytes * self.add_s
        if scope != "replicas" or (role.hosts == 1 and not named):
            return total
        return total + seconds(
            self._demand,
            size_bytes,
            latency_s=self.link.latency_s,
            s_per_byte=self.link.busy_s_per_byte,
            # Inside a host a schedule adds as many bytes as the host's own sum, and passes them on besides.
            add_s=self._moving_s if role.hosts > 1 else self.add_s,
            inner_s=self.mailbox_s,
            meeting_s=self.meeting_s,
        )

    def swap_s(self, size_bytes: float) -> Amount:
        """Two replicas exchange vectors; with how many of all others a host is shared says how likely each way is."""
        role = self.role
        inside = self.meeting_s + size_bytes * self.mailbox_s
        if role.hosts == 1:
            return inside
        likely = (role.neighbours - 1) / max(1, role.workers - 1)
        # All workers of a host may swap at once over its link.
        across = self.link.latency_s + size_bytes * (
            self.link.busy_s_per_byte * role.neighbours * (1 - likely) + self._moving_s
        )
        return likely * inside + (1 - likely) * across

    @cached_property
    def mailbox_s(self) -> Amount:
        """Wall seconds per byte of a message inside a host: copied in and out, and the two meet at every full box."""
        return 4 * self.touch_s + 2 * self.meeting_s / MAILBOX_BYTES

    @cached_property
    def round_trip_s(self) -> Amount:
        """Numbers to all and back, as in a handshake."""
        rounds = 2 * max(1, (self.role.hosts - 1).bit_length()) if self.role.hosts > 1 else 0
        return self.meeting_s + rounds * self.link.latency_s

    @cached_property
    def _moving_s(self) -> Amount:
        """Wall seconds of a core per byte; workers who serve a lane each move their part at the same time."""
        native = self.way.traits.topology == "native" or self.role.shares_replica
        lanes = self.role.neighbours if native else 1
        return self.link.cpu_s_per_byte * self.wall_per_cpu * self.threads / lanes

    @cached_property
    def _demand(self) -> Any:
        topology = self.way.traits.topology
        if topology == "native" or self.role.shares_replica:
            return native_ring(self.role.hosts)
        return demand_of(topology, self.role.hosts, self.role.neighbours)

    @property
    def is_busy(self) -> bool:
        """Whether the worker's passes use all cores that it has."""
        return self.threads >= self.cores

    def sent_cpu_s(self, size_bytes: float) -> Amount:
        """Wall time that a pass loses to a sum that is sent meanwhile."""
        if not self.is_busy:
            return 0.0
        mine = size_bytes / (self.role.neighbours if self.role.shares_replica else 1)
        return self._demand.busiest * mine * self.link.cpu_s_per_byte * self.wall_per_cpu


def conditions(facts: Facts, way: Way, host: HostSplit, pick: Pick = best) -> Conditions:
    """For the workers of this kind of host, in this way."""
    kind = kind_of(facts.cluster, host.kind)
    split = split_of(kind.host, host)
    mesh, traits, model = way.mesh, way.traits, facts.model
    hosts = max(1, min(way.host_count, mesh.replicas))
    role = role_of(traits, mesh.replicas, hosts, facts.batch, divisible=model.divisible_optimizer)
    spans = spans_of(model, mesh.members)
    crowding = crowding_of(facts.cluster, way, kind)
    kappa = pick(split.wall_per_cpu) * crowding
    whole = _whole(split, kappa, pick)
    # Workers of a host with other parts of the model exchange theirs over the same link at the same time.
    beside = max(1.0, host.processes / role.neighbours) if mesh.members > 1 else 1.0
    link = link_cost(facts.cluster, way, pick, beside)
    touch_s = kappa / kind.host.kernels.bytes_per_s
    meeting_s = pick(split.meeting_s) * crowding + SLICE_S * later(kappa * split.threads - MEMORY_BOUND, 0.0)
    jitter = split.jitter or next((each.jitter for each in kind.host.splits if each.jitter), ())
    inside = InnerLink(meeting_s, pick(split.sum_cpu_s) * kappa * 2)
    if way.host_count > 1 and host.processes % mesh.members:  # a replica lies on several hosts
        inside = InnerLink(link.latency_s, link.busy_s_per_byte + link.cpu_s_per_byte * kappa)
    return Conditions(
        way=way,
        role=role,
        spans=spans,
        recorded=record(way.parsed, role, spans),
        passing=pass_cost(
            model, mesh, way.placed, facts.batch, whole, inside, slowest(jitter, mesh.members) - 1
        ),
        wall_per_cpu=kappa,
        update_s=pick(split.update_cpu_s) * kappa / PARAMETER_BYTES,
        add_s=pick(split.sum_cpu_s) * kappa,
        touch_s=touch_s,
        meeting_s=meeting_s,
        session_s=pick(kind.host.step_cpu_s) * kappa * split.threads,
        link=link,
        jitter=jitter,
        cores=kind.host.cores / host.processes / _overlap(facts.cluster, way, kind),
        threads=host.threads,
        crowding=crowding,
    )


def _whole(split: SplitFacts, kappa: Any, pick: Pick) -> Callable[[float], Any]:
    a, c = pick(split.pass_cpu_s), pick(split.sample_cpu_s)
    return lambda samples: kappa * (a + c * samples)


def kind_of(cluster: ClusterFacts, name: str) -> HostsOfKind:
    return next(each for each in cluster.hosts if each.host.kind == name)


def split_of(host: HostFacts, wanted: HostSplit) -> SplitFacts:
    return next(
        each for each in host.splits if (each.processes, each.threads) == (wanted.processes, wanted.threads)
    )


def crowding_of(cluster: ClusterFacts, way: Way, kind: HostsOfKind) -> float:
    """Threads of all hosts of a machine ÷ its cores, where they are more than the split was measured with."""
    mine = next(each for each in way.hosts if each.kind == kind.host.kind)
    measured = max(1.0, mine.processes * mine.threads / kind.host.cores)
    return max(1.0, _overlap(cluster, way, kind) / measured)


def _overlap(cluster: ClusterFacts, way: Way, kind: HostsOfKind) -> float:
    """How many hosts' worth of busy threads are on this kind's machine; at least 1."""
    if not kind.machine:
        return 1.0
    total = 0.0
    for each in way.hosts:
        other = kind_of(cluster, each.kind)
        if other.machine == kind.machine:
            total += each.count * each.processes * each.threads / kind.host.cores
    return max(1.0, total)


def link_cost(cluster: ClusterFacts, way: Way, pick: Pick = best, beside: float = 1.0) -> LinkCost:
    """The slowest link between two hosts of this way: schedules wait for it. So many exchanges share it."""
    if way.host_count == 1:
        return LinkCost()
    found = [facts for facts in _links(cluster, way) if facts is not None]
    if not found:
        return LinkCost()
    slowest = max(found, key=lambda each: (each.s_per_byte.value, each.latency_s.value))
    return LinkCost(
        latency_s=pick(slowest.latency_s),
        s_per_byte=pick(slowest.s_per_byte),
        both_ways=pick(slowest.both_ways),
        cpu_s_per_byte=pick(slowest.cpu_s_per_byte),
        sharing=beside * (way.host_count if slowest.shared else 1),
    )


def _links(cluster: ClusterFacts, way: Way) -> list[LinkFacts | None]:
    kinds = [each.kind for each in way.hosts]
    named = {frozenset((one, other)): link for one, other, link in cluster.links}
    return [
        named.get(frozenset((one, other)), cluster.link)
        for place, one in enumerate(kinds)
        for other in kinds[place:]
        if one != other or next(each.count for each in way.hosts if each.kind == one) > 1
    ]
