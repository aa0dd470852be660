"""A host that was never measured, from one that was, by the two reference kernels.

A pass is partly bound by arithmetic and partly by memory, and which is not known: its time is taken to lie between
that scaled by the one kernel and that scaled by the other, in the middle, and the interval reaches over both. Updates
and sums are bound by memory. Threads beyond those measured go on losing as much with every doubling.
"""

import math

import msgspec

from manyhands.planner.facts import Estimate, HostFacts, KernelPair, SplitFacts

LEAST_SPREAD = 0.25
"""A host of another kind is never known better than that."""


def scaled(
    measured: HostFacts,
    kind: str,
    *,
    cores: int,
    memory_bytes: int,
    flops_per_s: float | None = None,
    bytes_per_s: float | None = None,
) -> HostFacts:
    """A host of another kind; where nothing is said of its cores, they are as fast as those that were measured."""
    flops = measured.kernels.flops_per_s / (flops_per_s or measured.kernels.flops_per_s)
    moved = measured.kernels.bytes_per_s / (bytes_per_s or measured.kernels.bytes_per_s)
    passes = math.sqrt(flops * moved)
    apart = abs(math.log(flops / moved)) / 2
    usable = [split for split in measured.splits if not split.error]
    return HostFacts(
        kind=kind,
        cores=cores,
        memory_bytes=memory_bytes,
        kernels=KernelPair(
            flops_per_s=measured.kernels.flops_per_s / flops, bytes_per_s=measured.kernels.bytes_per_s / moved
        ),
        splits=tuple(
            _split(measured, usable, processes, cores // processes, passes, moved)
            for processes in _processes(cores)
        ),
        step_cpu_s=measured.step_cpu_s.times(flops),
        process_bytes=measured.process_bytes,
        measured=False,
        spread=math.expm1(math.hypot(math.log1p(LEAST_SPREAD), math.log1p(measured.spread), apart)),
    )


def _processes(cores: int) -> list[int]:
    """Divisions of all cores in equal parts of 1, 2, 4, … threads, and one process with all of them."""
    threads = [1 << power for power in range(cores.bit_length())]
    return sorted({cores // each for each in threads} | {1})


def _split(
    measured: HostFacts,
    usable: list[SplitFacts],
    processes: int,
    threads: int,
    passes: float,
    moved: float,
) -> SplitFacts:
    base = min(usable, key=lambda split: (abs(split.threads - threads), -split.processes))
    grown = _doubling_loss(usable) ** max(0.0, math.log2(threads / base.threads))
    # κ · threads is what the host's memory costs when all are busy; on an idle host it is about 1.
    contention = base.wall_per_cpu.times(base.threads / threads)
    return msgspec.structs.replace(
        base,
        processes=processes,
        threads=threads,
        pass_cpu_s=base.pass_cpu_s.times(passes * grown),
        sample_cpu_s=base.sample_cpu_s.times(passes * grown),
        wall_per_cpu=contention,
        update_cpu_s=base.update_cpu_s.times(moved),
        sum_cpu_s=base.sum_cpu_s.times(moved),
        meeting_s=_meeting(base, processes),
        measured_batches=(),
    )


def _meeting(base: SplitFacts, processes: int) -> Estimate:
    """Every worker looks at the counters of all others."""
    return base.meeting_s.times(max(1.0, processes / max(1, base.processes)))


def _doubling_loss(usable: list[SplitFacts]) -> float:
    """CPU seconds of a sample with twice the threads ÷ those with as many."""
    by_threads = {split.threads: split.sample_cpu_s.value for split in usable}
    least, most = min(by_threads), max(by_threads)
    if most == least or by_threads[least] <= 0:
        return 1.1
    return float(max(1.0, (by_threads[most] / by_threads[least]) ** (1 / math.log2(most / least))))
