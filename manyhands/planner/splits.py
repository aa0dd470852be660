"""The ways in which a host's cores can be divided, all alive at once, and their turns.

pooled    the workers step together, as most runs do: which split is fastest is decided by these turns
apart     each worker has a replica of its own and no sum is made: what the passes and updates cost by themselves,
          with all workers of the host at it. One worker is both.
"""

import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from manyhands import strategies
from manyhands.cluster.launcher import cores
from manyhands.comm.transports.free_memory import available_bytes
from manyhands.lab.rounds import TurnClocks
from manyhands.lab.taking_turns import Answer, ContenderLost, TurnTaking, counted
from manyhands.planner.contender import Contender, Divided
from manyhands.strategies.local_sgd import LocalSGD

POOLED = strategies.DEFAULT
APART = strategies.describe(LocalSGD(period=10**9))

START_S = 90.0
ANSWER_S = 120.0
TURN_S = 0.1
"""How long a turn takes, about: longer ones find another machine than those before."""
_BY_SIGNAL = 128
_FEW = 2  # of one alone, layers that normalise over a batch would say no
_LONG_STEP_S = 2.0
_MOST_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Split:
    """So many processes with so many threads each."""

    processes: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.processes} × {self.threads}"


def possible(usable: int, workers: int | None = None, threads: int | None = None) -> list[Split]:
    """The splits of so many cores, the simplest first: few processes. What is given is held fixed."""
    if workers is not None:
        options = {1, max(1, usable // workers)} if threads is None else {threads}
        return [Split(processes=workers, threads=each) for each in sorted(options, reverse=True)]
    counts = sorted({1, *(2**k for k in range(1, usable.bit_length()) if 2**k < usable), usable})
    if threads is not None:
        return [Split(processes=p, threads=threads) for p in counts if p == 1 or p * threads <= usable]
    found = [Split(processes=p, threads=usable // p) for p in counts]
    return found + ([Split(processes=1, threads=1)] if usable > 1 else [])


def usable_cores() -> int:
    """Those that a run may use: a control group's limit, rounded down, where it has one."""
    quota = cores.quota_cores()
    there = len(os.sched_getaffinity(0))
    return max(1, min(there, int(quota))) if quota is not None else there


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the turns of one split gave; each list has an item for each turn."""

    passes: dict[int, list[float]] = field(default_factory=dict)
    """Processor seconds of a worker's pass, by its samples: without sums."""
    pass_wall_s: dict[int, list[float]] = field(default_factory=dict)
    updates: list[float] = field(default_factory=list)
    """Processor seconds of a worker's update of all parameters."""
    rest: list[float] = field(default_factory=list)
    """Processor seconds of a worker's step that are neither."""
    whole: list[float] = field(default_factory=list)
    """Processor seconds of a worker's step in which all workers pool their gradients."""
    wall_s: list[float] = field(default_factory=list)
    """Of single steps ÷ their turn's median."""
    meetings_s: list[float] = field(default_factory=list)


@dataclass
class DividedHost:
    """All splits alive at once. Leaving the context ends them all."""

    splits: Sequence[Split]
    command: Callable[[Split, str], Sequence[str]]
    """What the workers of a split run under a strategy."""
    lost: dict[str, str] = field(default_factory=dict)
    """Why a split cannot run, as a person should read it."""
    measured: dict[str, Measured] = field(default_factory=dict)
    seen_s: dict[str, float] = field(default_factory=dict)
    """Wall seconds per sample of each split in its first steps: rough, and enough to know where to look."""
    memory_of_half: dict[str, list[Answer]] = field(default_factory=dict)
    """What each worker's memory was when it had seen half batches alone."""

    def __post_init__(self) -> None:
        self._of = {split.name: split for split in self.splits}
        self._contenders: dict[str, Contender] = {}
        self._number: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self._batch: dict[str, int] = {}

    def __enter__(self) -> "DividedHost":
        # Leave through every `finally` also when this process is asked to end.
        self._on_sigterm = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(_BY_SIGNAL + number))
        self._turns = TurnTaking().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._turns.__exit__(*exception)
            for contender in self._contenders.values():
                contender.close()
        finally:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def start(self, on_start: Callable[[str], None]) -> None:
        """Start every split's workers at once, and wait until they have made a few steps."""
        for split in self.splits:
            for kind in self._kinds(split):
                self._begin(split, kind)
        for split in self.splits:
            on_start(split.name)
            self.measured[split.name] = Measured()
            with self._marking(split.name):
                for kind in self._kinds(split):
                    self._turns.meet(_key(split, kind), split.processes, START_S)
                    self._warm_up(split, kind)

    def take(self, name: str) -> TurnClocks:
        """The turn of a split, as rounds want it."""
        split, number = self._of[name], self._number.get(name, 0)
        self._number[name] = number + 1
        try:
            turn = self._turn(split, POOLED)
            own = self._turn(split, APART) if split.processes > 1 and not number % 2 else turn
            measured = self.measured[name]
            if split.processes == 1 or not number % 2:
                self._keep_pass(measured, own)
                measured.updates.append(_mean(own, "update_processor_s"))
                measured.rest.append(_rest(own))
            if number % 2:
                half = self._turn(split, APART, max(1, self._batch[name] // 2))
                self._keep_pass(measured, half)
        except ContenderLost as lost:
            self._mark(name, lost)
            raise ContenderLost(name, self.lost[name]) from None
        return self._clocks(measured, turn)

    def ask(self, name: str, order: dict[str, Any], kind: str = POOLED) -> list[Answer]:
        return self._turns.ask(_key(self._of[name], kind), order, ANSWER_S)

    def steps_of(self, name: str, steps: int) -> None:
        """Some steps that are not measured."""
        self.ask(name, {"steps": steps})

    @property
    def alive(self) -> list[str]:
        return [split.name for split in self.splits if split.name not in self.lost]

    def batch_of(self, name: str) -> int:
        return self._batch[name]

    def _kinds(self, split: Split) -> tuple[str, ...]:
        return (POOLED, APART) if split.processes > 1 else (POOLED,)

    def _begin(self, split: Split, kind: str) -> None:
        divided = Divided(
            workers=split.processes,
            threads=split.threads,
            strategy=kind,
            command=tuple(self.command(split, kind)),
        )

        def begin(path: str) -> Contender:
            self._contenders[_key(split, kind)] = Contender(divided, path)
            return self._contenders[_key(split, kind)]

        self._turns.start(_key(split, kind), begin)

    def _warm_up(self, split: Split, kind: str) -> None:
        """The first steps are slower. They begin with few samples, then half a batch: each size shows in the peak."""
        key, name = _key(split, kind), split.name
        first = self._turns.ask(key, {"steps": 1, "samples": _FEW}, START_S)
        self._batch[name] = batch = int(first[0]["batch"])
        self._turns.ask(key, {"steps": 2, "samples": max(1, batch // 2)}, ANSWER_S)
        if kind == POOLED:
            self.memory_of_half[name] = self._turns.ask(key, {"look": "memory"}, ANSWER_S)
        warm = self._turns.ask(key, {"steps": 3}, ANSWER_S)
        step_s = statistics.median(warm[0]["step_s"][1:])
        if kind == POOLED:
            self.seen_s[name] = step_s / (batch * split.processes)
        self._steps[name] = (
            1 if step_s > _LONG_STEP_S else max(2, min(_MOST_STEPS, round(TURN_S / max(step_s, 1e-6))))
        )

    def _turn(self, split: Split, kind: str, samples: int | None = None) -> list[Answer]:
        key = _key(split, kind if split.processes > 1 else POOLED)
        steps = self._steps[split.name]
        first = int(steps > 1)  # it finds nothing of its own in the caches
        order: dict[str, Any] = {"steps": steps + first}
        if samples is not None:
            order["samples"] = samples
        return counted(self._turns.ask(key, order, ANSWER_S), first)

    def _keep_pass(self, measured: Measured, turn: list[Answer]) -> None:
        samples = int(turn[0]["samples"])
        measured.passes.setdefault(samples, []).append(_mean(turn, "compute_processor_s"))
        measured.pass_wall_s.setdefault(samples, []).append(_mean(turn, "compute_s"))

    def _clocks(self, measured: Measured, turn: list[Answer]) -> TurnClocks:
        walls = [statistics.fmean(step) for step in zip(*(one["step_s"] for one in turn), strict=True)]
        work = [sum(step) for step in zip(*(one["step_processor_s"] for one in turn), strict=True)]
        median = statistics.median(walls)
        measured.wall_s.extend(wall / median for wall in walls if len(walls) > 2)
        measured.whole.append(statistics.fmean(work) / len(turn))
        return TurnClocks(
            wall_s=tuple(walls), processor_s=tuple(work), samples=sum(one["samples"] for one in turn)
        )

    @contextmanager
    def _marking(self, name: str) -> Iterator[None]:
        """A split that is lost inside the block is marked with the reason."""
        try:
            yield
        except ContenderLost as lost:
            self._mark(name, lost)

    def _mark(self, name: str, lost: ContenderLost) -> None:
        """A split cannot run; the reason is what its own launcher says, where that has ended."""
        reason = lost.reason
        split = self._of[name]
        for kind in self._kinds(split):
            key = _key(split, kind)
            contender = self._contenders[key]
            if not contender.is_alive() or lost.name == key:
                self._turns.end(key, 5.0)
                ended = contender.end()
                reason = reason if ended.ok else ended.reason
        self.lost[name] = reason


def _key(split: Split, kind: str) -> str:
    return f"{split.name} {kind.partition(':')[0]}"


def _mean(turn: list[Answer], counter: str) -> float:
    """Of a worker's step."""
    return statistics.fmean(step.get(counter, 0.0) for one in turn for step in one["counted"])


def _rest(turn: list[Answer]) -> float:
    whole = statistics.fmean(step for one in turn for step in one["step_processor_s"])
    return max(0.0, whole - _mean(turn, "compute_processor_s") - _mean(turn, "update_processor_s"))


def enough_memory(splits: Sequence[Split], process_bytes: float) -> list[Split]:
    """Those that may be alive at once."""
    free = float(available_bytes())
    kept: list[Split] = []
    for split in splits:
        needed = process_bytes * split.processes * (2 if split.processes > 1 else 1)
        if needed <= free or not kept:
            kept.append(split)
            free -= needed
    return kept
