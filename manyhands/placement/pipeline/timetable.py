"""Pipeline schedules as data: for every worker, what it does in which order.

Every schedule is a policy in one small simulation of the whole pipeline: a worker that is free takes the first
in rank of the actions whose inputs are there. So no schedule can wait for what never comes, and any
number of microbatches is allowed. All workers compute the same table without a message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

# A forward pass, a backward pass (or, where it is divided, its part for the stage before), gradients of weights.
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


@dataclass(frozen=True)
class Action:
    """One piece of work: a microbatch through one of the worker's chunks."""

    kind: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


Table = tuple[tuple[Action, ...], ...]  # by worker


@dataclass(frozen=True)
class Policy:
    """How many microbatches a worker may hold, and whether backward passes are divided."""

    held: Callable[[int, int, int, int], int]  # worker, workers, chunks, microbatches
    divided: bool = False


SCHEDULES: Mapping[str, Policy] = {
    # All forward passes, then all backward passes: every microbatch's activations are held at once.
    "gpipe": Policy(lambda worker, workers, chunks, micros: micros),
    # One forward, one backward: a worker holds no more than there are workers from it to the end. All but the last
    # are one ahead of that, so that no worker waits for the next one when that is late for a moment.
    "1f1b": Policy(lambda worker, workers, chunks, micros: workers - worker + (worker < workers - 1)),
    # The same with several chunks of the model on each worker, which makes the pipeline fill faster.
    "interleaved": Policy(
        lambda worker, workers, chunks, micros: 2 * (workers - worker - 1) + (chunks - 1) * workers + 1
    ),
    # 1F1B whose gradients of weights wait for a moment in which there is nothing else to do (ZB-H1).
    "zero-bubble": Policy(lambda worker, workers, chunks, micros: workers - worker, divided=True),
}


def _rank(action: Action, workers: int) -> tuple[int, ...]:
    """The lowest goes first: forward while microbatches may be added, in groups of as many microbatches as workers.

    Forward the first chunk of a group comes before the second, backward after it.
    """
    group = action.micro // workers
    if action.kind == FORWARD:
        return (0, group, action.chunk, action.micro)
    return (1 if action.kind == BACKWARD else 2, group, -action.chunk, action.micro)


@lru_cache
def table(name: str, workers: int, chunks: int, micros: int) -> Table:
    """The order of every worker's actions."""
    return simulate(name, workers, chunks, micros)[0]


def simulate(name: str, workers: int, chunks: int, micros: int) -> tuple[Table, list[int]]:
    """The table, and how long each worker is idle, in forward passes; a whole backward pass takes two."""
    policy = SCHEDULES[name]
    kinds = {FORWARD: 1, BACKWARD: 1, WEIGHTS: 1} if policy.divided else {FORWARD: 1, BACKWARD: 2}
    limits = [policy.held(worker, workers, chunks, micros) for worker in range(workers)]
    todo = [
        {Action(kind, chunk, micro) for kind in kinds for chunk in range(chunks) for micro in range(micros)}
        for _ in range(workers)
    ]
    done: dict[tuple[str, int, int], int] = {}  # kind, stage and microbatch: when it was finished
    order: list[list[Action]] = [[] for _ in range(workers)]
    free = [0] * workers
    held = [0] * workers
    now = 0
    while any(todo):
        began = False
        for worker in range(workers):
            if free[worker] > now or not todo[worker]:
                continue
            ready = [
                action
                for action in todo[worker]
                if all(done.get(need, now + 1) <= now for need in _needs(action, worker, workers, chunks))
                and (action.kind != FORWARD or held[worker] < limits[worker])
            ]
            if not ready:
                continue
            action = min(ready, key=lambda each: _rank(each, workers))
            began = True
            todo[worker].remove(action)
            order[worker].append(action)
            held[worker] += {FORWARD: 1, BACKWARD: -1}.get(action.kind, 0)
            free[worker] = now + kinds[action.kind]
            done[action.kind, action.chunk * workers + worker, action.micro] = free[worker]
        if not began and max(free) <= now:  # all wait for one that may hold no more microbatches: let it
            limits = [limit + 1 for limit in limits]
        now += 1
    total = max(free)
    busy = [sum(kinds[action.kind] for action in actions) for actions in order]
    return tuple(map(tuple, order)), [total - each for each in busy]


def _needs(action: Action, worker: int, workers: int, chunks: int) -> list[tuple[str, int, int]]:
    """What must be finished before: stage s is chunk s ÷ workers of worker s mod workers."""
    stage, last = action.chunk * workers + worker, workers * chunks - 1
    if action.kind == FORWARD:
        return [(FORWARD, stage - 1, action.micro)] if stage else []
    if action.kind == WEIGHTS:
        return [(BACKWARD, stage, action.micro)]
    return [(BACKWARD, stage + 1, action.micro) if stage < last else (FORWARD, stage, action.micro)]
