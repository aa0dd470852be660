"""Contenders that have turns in a benchmark, by `manyhands.lab.taking_turns`: started one by one, with a record of
every round."""

import multiprocessing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from common import interleave, say

from manyhands.lab.taking_turns import Paced, TurnTaking, counted, follow

__all__ = ["Paced", "Start", "Turn", "follow", "in_turns"]

Turn = list[dict[str, Any]]  # of each worker: `batch`, `step_s` and `losses`
Start = Callable[[list[str]], object]
"""Starts the workers of a contender, given what they are to be told, and returns when they have ended."""


def in_turns(
    contenders: Mapping[str, tuple[Start, int]], label: str, *, rounds: int, steps: int, warm_up: int
) -> dict[str, list[Turn]]:
    """What each contender, given how it is started and its number of workers, made of its turns of so many steps."""

    def begin(start: Start, path: str) -> Any:
        # A fork, so that a contender may be any function of the benchmark.
        process = multiprocessing.get_context("fork").Process(target=start, args=(["--baton", path],))
        process.start()
        return process

    def take(name: str, steps: int, to_warm_up: int = 1) -> Turn:
        return counted(turns.ask(name, {"steps": to_warm_up + steps}), to_warm_up)

    with TurnTaking() as turns:
        for name, (start, workers) in contenders.items():
            say(f"{label}: {name} starts")
            turns.start(name, partial(begin, start))
            turns.meet(name, workers)
            take(name, 0, warm_up)
        return interleave({name: partial(take, name, steps) for name in contenders}, rounds, label)
