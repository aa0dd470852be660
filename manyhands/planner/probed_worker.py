"""A worker that is probed: the job's own command, held up after every step until it is this contender's turn again.

`python -m manyhands.planner.probed_worker SOCKET SCRIPT [arguments]`, as a contender's launcher starts it. The session,
the strategy, the data and the loop are those of a run, so what is measured is what will run. It ends in the middle of
the loop, when nothing is asked any more.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

from manyhands import telemetry
from manyhands.cluster.worker import entry
from manyhands.data.structure import parts_of, samples_in
from manyhands.engine import pacing, take_over
from manyhands.engine.engine import Engine
from manyhands.engine.own_gradient import is_loss_itself
from manyhands.errors import UsageError
from manyhands.lab.taking_turns import Answer, Order, Paced
from manyhands.planner import pass_watch

_MEETINGS = 60


class ProbePacer:
    """Takes turns when it is asked to. The first session that makes a step is the one that is probed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._paced: Paced | None = None
        self._engine: Engine | None = None
        self._passes: pass_watch.PassWatch | None = None
        self._told: Answer = {}

    def begin(self, engine: Engine, batches: Sequence[Any]) -> Sequence[Any]:
        if self._paced is None:
            if not batches or is_loss_itself(batches):
                raise UsageError(
                    "the script computes its loss itself and gives session.backward no batch, so a probe cannot know "
                    "its samples; name the strategy, the workers and the threads"
                )
            self._connect(engine, batches)
        if engine is not self._engine or self._paced is None:
            return batches
        wanted = self._paced.order.get("samples")
        if wanted:
            batches = [_first(batch, wanted) for batch in batches]
        self._told["samples"] = sum(_samples(batch) for batch in batches)
        return batches

    def end(self) -> None:
        if self._passes:
            self._passes.end_step()
        if self._paced:
            self._paced.step()

    def _connect(self, engine: Engine, batches: Sequence[Any]) -> None:
        self._engine = engine
        self._before = pass_watch.memory()
        self._told |= {"batch": sum(_samples(batch) for batch in batches)}
        orders = {"watch": self._watch, "look": self._look, "meet": self._meet}
        self._paced = Paced(
            self._path, engine.world.rank, self._told, orders=orders, counters=telemetry.totals
        )

    # What is asked between turns

    def _watch(self, order: Order) -> Answer:
        """Put hooks on the model, or take them off and say what they have seen."""
        assert self._engine is not None
        if order["watch"]:
            self._passes = pass_watch.PassWatch(self._engine.training.model)
            self._passes.install()
            return {}
        assert self._passes is not None
        seen, self._passes = self._passes, None
        seen.remove()
        replica = self._engine.generation.replica
        return {
            **seen.told(replica.layout),
            "span_bytes": [4 * (span.stop - span.start) for span in replica.layout.spans],
            "divisible": not replica.runs_whole,
            "samples_per_epoch": max((feed.length for feed in self._engine.feeds.open), default=0),
        }

    def _look(self, order: Order) -> Answer:
        """At one of the things that are not seen in a step."""
        assert self._engine is not None
        if order["look"] == "memory":
            found = {"before": self._before, **pass_watch.memory()}
            pass_watch.forget_peak()
            return found
        if order["look"] == "kernels":
            return pass_watch.kernels()
        return {"state": pass_watch.state_bytes(take_over.optimizer_state(self._engine))}

    def _meet(self, order: Order) -> Answer:
        """Wall seconds of a meeting of all workers."""
        assert self._engine is not None
        world, found = self._engine.world, []
        for _ in range(_MEETINGS):
            began_s = time.monotonic()
            world.exchange([])
            found.append(time.monotonic() - began_s)
        return {"meeting_s": found[_MEETINGS // 6 :]}


def _samples(batch: Any) -> int:
    try:
        return samples_in(batch)
    except Exception:  # a loss that the script has computed itself, and no batch
        return 1


def _first(batch: Any, samples: int) -> Any:
    """The first samples of a batch; all of it where it has no more, or cannot be cut."""
    if _samples(batch) <= samples:
        return batch
    return parts_of([batch], samples, None)[0][0][0]


def main(arguments: Sequence[str]) -> None:
    path, *command = arguments
    telemetry.count_processor_time()
    pacing.pacers.append(ProbePacer(path))
    entry.run_command(command)


if __name__ == "__main__":
    main(sys.argv[1:])
