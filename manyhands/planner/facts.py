"""What is known of a host, a link, a model and a cluster: the probe fills this in, the price reads nothing else.

Every coefficient is an `Estimate`: its best value, and the values that it takes when what was measured is drawn again
(bootstrap). Draw k of all coefficients belongs together: those of one fit come from one draw of the measurements.

Two clocks. Work is in CPU seconds, summed over the threads of a process: busy neighbours hardly change them. What a
person waits for is wall seconds = `wall_per_cpu` (κ) times CPU seconds, and κ is reported apart.
"""

import math
from collections.abc import Sequence

import msgspec

DRAWS = 200
"""Draws that a measured coefficient keeps."""


class Estimate(msgspec.Struct, frozen=True):
    """A coefficient with what it could be as well."""

    value: float
    """The best value: a median, or the fit to all measurements."""
    draws: tuple[float, ...] = ()
    """The values of `DRAWS` bootstrap draws; empty where the value is exact or was given."""

    @classmethod
    def about(cls, value: float, spread: float, draws: int = DRAWS) -> "Estimate":
        """A value that may be wrong by a factor of 1 + `spread`, either way, in one case of ten."""
        if not spread or not value:
            return cls(value)
        # Quantiles of a log-normal in an order that no other coefficient has: a full cycle through all of them.
        step = _coprime(draws, value)
        quantiles = [(k * step % draws + 0.5) / draws for k in range(draws)]
        return cls(value, tuple(value * math.exp(math.log1p(spread) / 1.645 * _normal(q)) for q in quantiles))

    def times(self, factor: float) -> "Estimate":
        return Estimate(self.value * factor, tuple(draw * factor for draw in self.draws))

    def interval(self, inside: float = 0.9) -> tuple[float, float]:
        """The quantiles between which this share of the draws lies."""
        if not self.draws:
            return self.value, self.value
        ordered = sorted(self.draws)
        last = len(ordered) - 1
        low = (1 - inside) / 2
        return ordered[round(low * last)], ordered[round((1 - low) * last)]


NOTHING = Estimate(0.0)
ONE = Estimate(1.0)


class KernelPair(msgspec.Struct, frozen=True, kw_only=True):
    """The reference kernels: hosts that were never measured are scaled by them."""

    flops_per_s: float
    """Of one core with a matrix product that fits its cache (float32): compute-bound work goes with it."""
    bytes_per_s: float
    """Of one core adding a vector far larger than the caches (read and written bytes): memory-bound work."""


class SplitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host's cores as so many processes with so many threads, measured with all of them running at once.

    The forward and backward pass of one process on a batch of b samples takes `pass_cpu_s` + b · `sample_cpu_s` CPU
    seconds, and `wall_per_cpu` times that in wall seconds.
    """

    processes: int
    threads: int
    """Of each process."""
    pass_cpu_s: Estimate
    """a: CPU seconds of a pass whatever the batch."""
    sample_cpu_s: Estimate
    """c: CPU seconds per sample."""
    wall_per_cpu: Estimate = ONE
    """κ: wall seconds per CPU second of one process; about 1 ÷ threads on an idle host."""
    update_cpu_s: Estimate = NOTHING
    """CPU seconds of one process per parameter that its optimizer updates, with the others updating theirs."""
    sum_cpu_s: Estimate = NOTHING
    """CPU seconds of one process per byte of its gradients that it adds to a sum in the host's memory."""
    meeting_s: Estimate = NOTHING
    """Wall seconds of one meeting (barrier) of all processes of the host."""
    jitter: tuple[float, ...] = ()
    """Measured steps ÷ their median, in any order: what the slowest of many workers waits for. The coefficients above
    are those of a median step; the price multiplies by the mean of this where it wants a mean."""
    measured_batches: tuple[int, ...] = ()
    """The batch sizes that `pass_cpu_s` and `sample_cpu_s` were fitted on; empty where nothing was measured."""
    error: str = ""
    """Why this split cannot run (it crashed, or does not fit), as a person should read it; else empty."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of host, with one model."""

    kind: str
    cores: int
    """That a run may use: a control group's limit, rounded down, where it has one."""
    memory_bytes: int
    """That a run may use."""
    kernels: KernelPair
    splits: tuple[SplitFacts, ...]
    step_cpu_s: Estimate = NOTHING
    """CPU seconds of a worker per step for what a session does beside the strategy: handshake, commit, records."""
    process_bytes: int = 0
    """Memory of a worker process that has loaded the model's code and no model."""
    measured: bool = True
    """False: never measured, but scaled from another kind by the reference kernels; `spread` is wider."""
    spread: float = 0.0
    """By how much (0.1: a tenth) a prediction may be wrong, in one case of ten, beyond what the draws say."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What messages between two hosts cost, over the transport that a run uses."""

    latency_s: Estimate
    """α: wall seconds of an empty message, one way."""
    s_per_byte: Estimate
    """β: wall seconds per byte in one direction, when the other direction is idle; 1 ÷ bandwidth."""
    both_ways: Estimate = ONE
    """d: seconds per byte when both directions are busy ÷ β; 1: each has all of the bandwidth, 2: they share it."""
    cpu_s_per_byte: Estimate = NOTHING
    """γ: CPU seconds at each end per byte that is sent, or received and added."""
    shared: bool = False
    """Whether all hosts on this link share its bandwidth (a hub, an uplink); otherwise each host has all of it."""


class LayerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that a placement may put elsewhere, in the order of the forward pass."""

    name: str
    parameters: int
    share: float
    """Of the model's compute, forward and backward; those of all layers add up to 1."""
    output_bytes: float
    """Bytes per sample that the next layer needs."""
    divisible: bool = False
    """Whether a tensor placement divides it."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its optimizer under a batch."""

    name: str
    parameters: int
    span_bytes: tuple[int, ...]
    """Of the gradients' flat vector, in the order in which a backward pass finishes spans; they add up to S."""
    ready: tuple[float, ...]
    """r_k: when span k is complete, as a share of the whole pass (forward begins at 0, backward ends at 1)."""
    forward_share: float = 1 / 3
    """Of a pass."""
    activation_bytes: float = 0.0
    """A0: memory of a worker's pass whatever the batch."""
    sample_activation_bytes: float = 0.0
    """A1: memory of a worker's pass per sample."""
    state_bytes: int = 0
    """Of the optimizer, once."""
    divisible_optimizer: bool = True
    """Whether owners of spans may share the update; otherwise every worker has a replica and makes all of it."""
    layers: tuple[LayerFacts, ...] = ()
    """Empty: only placements that keep the model whole are planned."""
    samples_per_epoch: int = 0

    @property
    def bytes(self) -> int:
        """S: of the gradients, and of the parameters."""
        return sum(self.span_bytes)


class HostsOfKind(msgspec.Struct, frozen=True, kw_only=True):
    """So many hosts of one kind in a cluster."""

    host: HostFacts
    count: int = 1
    machine: str = ""
    """Hosts with the same name here are emulated on one machine, and share its cores; empty: each has its own."""
    cost_per_hour: float = 0.0
    """Of one host."""
    failures_per_hour: float = 0.0
    """Of one host: how often it is lost."""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts and the links between them."""

    hosts: tuple[HostsOfKind, ...]
    link: LinkFacts | None = None
    """Between any two hosts that `links` does not name; None is allowed where there is one host."""
    links: tuple[tuple[str, str, LinkFacts], ...] = ()
    """Between hosts of two kinds (their names, in either order)."""
    recovery_s: float = 2.0
    """Wall seconds from the loss of a host to the next step of the others."""

    @property
    def size(self) -> int:
        return sum(each.count for each in self.hosts)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that a search needs."""

    model: ModelFacts
    cluster: ClusterFacts
    batch: int
    """Samples per worker and step."""
    indistinct: float = 0.0
    """A/A: by how much two runs of the same way differed in the same rounds (0.02: 2 %); what is nearer is a tie."""
    past_error: float = 0.0
    """By how much (0.1: a tenth) predictions like these were wrong in one case of ten, by the record of past runs."""
    notes: tuple[str, ...] = ()
    """What a person should know of how the facts came about: cached, scaled, a noisy machine."""


def with_hosts(facts: Facts, hosts: Sequence[HostsOfKind]) -> Facts:
    """The same on other hosts."""
    cluster = msgspec.structs.replace(facts.cluster, hosts=tuple(hosts))
    return msgspec.structs.replace(facts, cluster=cluster)


def _normal(quantile: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(quantile)


def _coprime(draws: int, value: float) -> int:
    """A step that visits every draw, another one for most values."""
    step = hash(value) % draws | 1
    while math.gcd(step, draws) > 1:
        step += 2
    return step
