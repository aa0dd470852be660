"""Facts written by hand, for tests of the planner: hosts, links and models that no probe has seen."""

import random

from manyhands.planner.facts import (
    ClusterFacts,
    Estimate,
    Facts,
    HostFacts,
    HostsOfKind,
    KernelPair,
    LayerFacts,
    LinkFacts,
    ModelFacts,
    SplitFacts,
)
from manyhands.planner.ways import HostSplit, Way

EVEN = tuple(1.0 + 0.03 * random.Random(number).random() for number in range(60))
"""Steps that hardly differ."""


def split(
    processes: int,
    threads: int,
    cores: int,
    *,
    sample_s: float = 0.01,
    jitter: tuple[float, ...] = EVEN,
    exact: bool = False,
) -> SplitFacts:
    """κ is 1 ÷ threads as long as there are cores; threads lose 8 % each."""
    loss = 1 + 0.08 * (threads - 1)
    spread = 0.0 if exact else 0.03
    return SplitFacts(
        processes=processes,
        threads=threads,
        pass_cpu_s=Estimate.about(0.05 * loss, spread),
        sample_cpu_s=Estimate.about(sample_s * loss, spread),
        wall_per_cpu=Estimate(max(1.0, processes * threads / cores) / threads),
        update_cpu_s=Estimate(1e-9),
        sum_cpu_s=Estimate(2e-10),
        meeting_s=Estimate(2e-5),
        jitter=jitter,
        measured_batches=(8, 32),
    )


def host(
    kind: str = "here",
    cores: int = 4,
    *,
    memory_gb: float = 16,
    sample_s: float = 0.01,
    jitter: tuple[float, ...] = EVEN,
    exact: bool = False,
) -> HostFacts:
    return HostFacts(
        kind=kind,
        cores=cores,
        memory_bytes=int(memory_gb * 1e9),
        kernels=KernelPair(flops_per_s=5e10, bytes_per_s=8e9),
        splits=tuple(
            split(processes, cores // processes, cores, sample_s=sample_s, jitter=jitter, exact=exact)
            for processes in (1, 2, 4, 8, 16)
            if processes <= cores
        ),
        step_cpu_s=Estimate(2e-4),
        process_bytes=200_000_000,
    )


def model(parameters: int = 15_000_000, *, layers: bool = False) -> ModelFacts:
    size, count = 4 * parameters, max(1, 4 * parameters >> 20)
    each = LayerFacts(name="layer", parameters=parameters // 10, share=0.1, output_bytes=64e3, divisible=True)
    return ModelFacts(
        name="made-up",
        parameters=parameters,
        span_bytes=(size // count,) * count,
        ready=tuple(1 / 3 + 2 / 3 * (number + 1) / count for number in range(count)),
        state_bytes=size,
        activation_bytes=1e8,
        sample_activation_bytes=4e6,
        layers=(each,) * 10 if layers else (),
        samples_per_epoch=50_000,
    )


def link(gbit_per_s: float = 1.0, *, exact: bool = False) -> LinkFacts:
    spread = 0.0 if exact else 0.03
    return LinkFacts(
        latency_s=Estimate.about(1e-4, spread),
        s_per_byte=Estimate.about(8e-9 / gbit_per_s, spread),
        cpu_s_per_byte=Estimate(1.5e-9),
    )


def facts(
    hosts: int = 1,
    *,
    gbit_per_s: float = 1.0,
    batch: int = 32,
    kind: HostFacts | None = None,
    of: ModelFacts | None = None,
    indistinct: float = 0.02,
) -> Facts:
    return Facts(
        model=of or model(),
        cluster=ClusterFacts(hosts=(HostsOfKind(host=kind or host(), count=hosts),), link=link(gbit_per_s)),
        batch=batch,
        indistinct=indistinct,
    )


def way(
    strategy: str,
    hosts: int = 1,
    processes: int = 4,
    threads: int = 1,
    *,
    servers: int = 0,
    placement: str = "single",
) -> Way:
    split = HostSplit(kind="here", count=hosts, processes=processes, threads=threads)
    return Way(strategy=strategy, hosts=(split,), servers=servers, placement=placement)
