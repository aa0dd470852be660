"""What all workers tell each other before a step, or before a call that is not a step."""

import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from manyhands.cluster.worker import leaving
from manyhands.cluster.worker.member import Regroup
from manyhands.cluster.worker.world import World
from manyhands.engine.engine import Engine
from manyhands.engine.generation import Generation
from manyhands.errors import UsageError
from manyhands.replica.optimizer.hyper_parameters import hyper_parameters, set_hyper_parameters

# What a worker has come for.
STEP, END_OF_DATA, EVALUATE, SAVE, RESUME, FINISH = range(6)
WORDS = (
    "called step()",
    "reached the end of its data",
    "called evaluate()",
    "called save()",
    "called resume()",
    "finished",
)

# What a worker asks all workers to do, once the step is made; the later includes the earlier.
NOTHING, SAVE_NOW, LEAVE = range(3)

_NO_NUMBERS = (bool, str, type(None))

# By rank: purpose, samples, digest of the settings, rounds used, change, what the worker asks for.
Rows = list[list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What all workers said."""

    purposes: list[int]
    total: float
    """Samples of all workers; those that several workers compute together count once."""
    of_replica: float
    """Samples of the workers of this replica."""
    drawn: list[int]
    """Rounds of its data that each worker has used, this step's included; of workers with the same
    data, one is named."""
    change: bool
    """Whether some worker has heard that the members of the run are to change."""
    asked: int
    """The most that a worker asks for."""

    def agree(self) -> bool:
        """Whether all workers have come for the same thing.

        Where some have come because they ask for something, the others need not have known: then
        all come again.
        """
        first = self.purposes[0]
        for rank, purpose in enumerate(self.purposes):
            if purpose != first and self.asked == NOTHING:
                raise UsageError(
                    f"workers disagree: worker 0 {WORDS[first]}, worker {rank} {WORDS[purpose]}; "
                    "evaluate, save and leave loops at the same points on every worker"
                )
        return all(purpose == first for purpose in self.purposes)


class Handshake:
    """One exchange of all workers. Those of this host have answered when it begins; `wait` returns when those of other
    hosts have answered too."""

    answers: Answers

    def __init__(self, answer: Callable[[], Rows], generation: Generation, follows: Optimizer | None) -> None:
        self._answer = answer
        self._generation = generation
        self._follows = follows
        self.is_answered = False

    def wait(self) -> Answers:
        if not self.is_answered:
            rows = self._answer()
            if self._follows is not None and len(rows) > 1:
                _follow_settings(rows, self._follows, self._generation.world)
            self.answers = self._sum_up(rows)
            self.is_answered = True
        return self.answers

    def total(self) -> float:
        return self.wait().total

    def of_replica(self) -> float:
        return self.wait().of_replica

    def _sum_up(self, rows: Rows) -> Answers:
        copies, members = self._generation.copies, self._generation.members
        if copies > 1:
            _check_same_samples(rows, copies)
        first = self._generation.world.rank // members * members
        samples = [row[1] for row in rows]
        return Answers(
            purposes=[int(row[0]) for row in rows],
            total=sum(samples[::copies]),
            of_replica=sum(samples[first : first + members : copies]),
            drawn=[int(row[3]) for row in rows[::copies]],
            change=any(row[4] for row in rows),
            asked=int(max(row[5] for row in rows)),
        )


def begin(engine: Engine, purpose: int, *, samples: int = 0) -> Handshake:
    """Tell all workers what this worker has come for, and what it brings."""
    if engine.change_is_due:
        raise Regroup
    optimizer, generation, member = engine.training.optimizer, engine.generation, engine.member
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    if count != engine.trained:
        raise UsageError(
            f"the optimizer had {engine.trained} parameters when the session was made and has {count} now; "
            "close the session and make a new one"
        )
    change = member is not None and member.wants_change
    # What a script has not used by the end of a loop it does not want.
    used = engine.feed.drawn if purpose in (STEP, END_OF_DATA) else engine.feed.used
    asks = wish(engine, purpose, engine.progress.steps + 1)
    world = generation.world
    follows = optimizer if world.size > 1 and engine.traits.same_settings else None
    digest = _digest(engine, follows.param_groups) if follows else 0
    row = [float(purpose), float(samples), float(digest), float(used), float(change), float(asks)]
    if world.size > 1 and not generation.one_host:
        return Handshake(world.start_exchange(row), generation, follows)
    rows = world.host.exchange(row) if world.size > 1 else [row]
    handshake = Handshake(lambda: rows, generation, follows)
    handshake.wait()
    return handshake


def _digest(engine: Engine, groups: list[dict[str, Any]]) -> int:
    """Of the optimizer's settings, which must be the same on all workers; they seldom change from step to step."""
    values = [value for group in groups for name, value in group.items() if name != "params"]
    known, digest = engine.told_settings
    if values != known:
        fixed = _numbers(values)
        numbers = hyper_parameters(engine.training.optimizer) if fixed is None else fixed
        digest = zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))
        engine.told_settings = (None if fixed is None else values), digest
    return digest


def _numbers(values: Iterable[Any]) -> list[float] | None:
    """As `hyper_parameters` finds them; None where a tensor or a list may change in place."""
    numbers: list[float] = []
    for value in values:
        kind = type(value)
        if kind is float or kind is int:
            numbers.append(value)
        elif kind is tuple:
            inner = _numbers(value)
            if inner is None:
                return None
            numbers += inner
        elif kind not in _NO_NUMBERS:
            return None
    return numbers


def wish(engine: Engine, purpose: int, steps: int) -> int:
    """What this worker asks all workers to do, after so many steps."""
    if leaving.is_asked and purpose not in (RESUME, FINISH):
        return LEAVE
    interval = engine.save_every
    if purpose == STEP and interval and interval.is_due(engine.progress, steps=steps):
        return max(engine.answering, SAVE_NOW)
    return engine.answering


def _check_same_samples(rows: Rows, copies: int) -> None:
    for rank, row in enumerate(rows):
        lead = rank // copies * copies
        if row[:2] != rows[lead][:2]:
            raise UsageError(
                f"workers {lead} and {rank} compute the same samples and were given "
                f"{rows[lead][1]:g} and {row[1]:g}; give workers of one replica the same batches"
            )


def _follow_settings(rows: Rows, optimizer: Optimizer, world: World) -> None:
    """Workers with data must agree on the optimizer's settings; a worker without data follows them,
    since it may own spans."""
    lead = next((rank for rank, row in enumerate(rows) if row[0] == STEP), None)
    if lead is None or not [row for row in rows if row[2] != rows[lead][2]]:
        return
    mine = hyper_parameters(optimizer)
    form = f"{len(mine)}d"
    every = [struct.unpack(form, payload) for payload in world.gather(struct.pack(form, *mine))]
    for rank, row in enumerate(rows):
        if row[0] == STEP and every[rank] != every[lead]:
            pair = next((a, b) for a, b in zip(every[lead], every[rank], strict=True) if a != b)
            raise UsageError(
                f"the optimizer's settings differ between workers: {pair[0]:g} on worker {lead}, {pair[1]:g} on "
                f"worker {rank}; step the scheduler equally often on all, or give it to mh.session(scheduler=…)"
            )
    set_hyper_parameters(optimizer, every[lead])
