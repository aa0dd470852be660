"""One golden curve for each thing registered: which there are, and how each is run.

All that knows how a session is made and stepped is in `_run_strategy` and `_run_placement`.
"""

import hashlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from manyhands import placement, strategies
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.errors import PeerLost, UsageError
from manyhands.placement import PLACEMENTS
from manyhands.placement.pipeline.timetable import SCHEDULES
from manyhands.strategies import PRESETS, STRATEGIES, Asked
from tests.golden.arithmetic import (
    ONLY,
    OPTIMIZERS,
    STEPS,
    Batch,
    as_bytes,
    batches_of,
    correct_roots,
    double_precision,
    even_batch,
    loss,
    make_batch,
    single_precision,
)
from tests.sessions import session_of
from tests.threads import in_threads

PATIENCE_S = 60.0
WORKERS = (1, 3)
SERVERS = 2
PLACED_SAMPLES = 8  # of a step, over all workers

# Settings under which ten steps show more than under the usual ones.
SHORT_PERIODS = [
    "local-sgd:period=3",
    "block-momentum:period=3",
    "elastic-averaging:period=3",
    "diloco:period=3",
    "tournament:every=3",
]
OTHER_WAYS = [
    *(f"all-reduce:topology={name}" for name in TOPOLOGIES),
    "parameter-server:async",
    "parameter-server:cache=true",
    "parameter-server:every=2=3",
    "downpour:fetch=2,push=5",  # 5 divides 10: the clock orders pushes that are left at the end
    "worker-groups:groups=1",
]
STRATEGY_TEXTS = list(dict.fromkeys([*STRATEGIES, *PRESETS, *SHORT_PERIODS, *OTHER_WAYS]))
PLACEMENT_TEXTS = [
    *PLACEMENTS,
    *(f"pipeline:schedule={name}" for name in SCHEDULES),
    "sharded:shards=2",
    "hybrid:schedule=interleaved,microbatches=3",
]


@dataclass(frozen=True)
class Case:
    """One run: `kind` is the table that `text` is read by."""

    kind: str
    text: str
    optimizer: str
    workers: int

    def __str__(self) -> str:
        return f"{self.text} {self.optimizer} {self.workers}"


def cases() -> list[Case]:
    return [*_strategy_cases(), *_placement_cases()]


def _strategy_cases() -> Iterator[Case]:
    for text in STRATEGY_TEXTS:
        only = strategies.tuning(strategies.parse(text)).only_optimizer
        counts = {count for wanted in WORKERS if (count := _fitting(text, wanted, only))}
        for optimizer in [only] if only else OPTIMIZERS:
            yield from (Case("strategies", text, optimizer, count) for count in sorted(counts))


def _fitting(text: str, wanted: int, only: str | None) -> int | None:
    """As many workers as wanted, or one more: groups of two cannot be made of three. `single` has one alone."""
    strategy = strategies.parse(text)
    for count in (wanted, wanted + 1):
        asked = Asked(
            workers=count, servers=SERVERS if strategy.traits.servers else 0, optimizer=only, hosts=1
        )
        with suppress(UsageError):
            strategies.admit(strategy, asked)
            return count
    return None


def _placement_cases() -> Iterator[Case]:
    for text in PLACEMENT_TEXTS:
        fewest = next(count for count in range(2, 9) if _forms(text, count))
        for optimizer in OPTIMIZERS:
            for count in (fewest, 2 * fewest):
                yield Case("placements", text, optimizer, count)


def _forms(text: str, workers: int) -> bool:
    with suppress(UsageError):
        placement.parse(text).mesh(workers)
        return True
    return False


def run(case: Case) -> dict[str, Any]:
    """The losses by worker and step, and a digest of all workers' parameters at the end."""
    with correct_roots():
        results = {"strategies": _run_strategy, "placements": _run_placement}[case.kind](case)
    digest = hashlib.sha256(b"".join(params for _, params in results)).hexdigest()
    return {"digest": digest, "losses": [losses for losses, _ in results]}


def _run_strategy(case: Case) -> list[tuple[list[float], bytes]]:
    strategy = strategies.parse(case.text)
    turns = _turns(case)
    barrier = threading.Barrier(case.workers)
    # L-BFGS goes by dot products, which BLAS computes.
    coarse = strategies.tuning(strategy).only_optimizer == "lbfgs"
    # In lockstep only the order of additions can be left to the clock: here no order rounds.
    exact = strategy.traits.lockstep and not strategy.traits.repeatable
    make_net = double_precision if exact else single_precision
    make = {**OPTIMIZERS, **ONLY}[case.optimizer]

    def brought(step: int, rank: int) -> list[Batch]:
        return [even_batch(rank, case.workers)] if exact else batches_of(step, rank)

    def work(world: World) -> tuple[list[float], bytes]:
        net = make_net()
        session = session_of(net, make(net), loss, world=world, strategy=case.text)
        if isinstance(world, ServerContext):
            session.close()  # it serves until all workers have left
        losses = []
        with _aborting(barrier):
            for step, turn in itertools.product(range(STEPS), range(turns)):
                if world.rank * turns // case.workers == turn:
                    losses.append(float(session.step(*brought(step, world.rank))))
                    if not strategy.traits.repeatable and session.engine.generation.servers is not None:
                        session.engine.generation.servers.settle()
                if not strategy.traits.repeatable:
                    barrier.wait(PATIENCE_S)
        session.close()
        return losses, as_bytes(list(net.parameters()), coarse=coarse)

    return in_threads(
        case.workers, work, strategy=case.text, servers=SERVERS if strategy.traits.servers else 0
    )


@contextmanager
def _aborting(barrier: threading.Barrier) -> Iterator[None]:
    """A worker that fails lets the others go at once, so that its own error is the one that is shown."""
    try:
        yield
    except threading.BrokenBarrierError as error:
        raise PeerLost("another worker failed") from error
    except BaseException:
        barrier.abort()
        raise


def _turns(case: Case) -> int:
    """In how many turns the workers take a step. Where a strategy is not repeatable, the clock decides whose update
    comes first; turns decide it instead, and each worker waits until the servers have applied what it pushed.

    Workers that wait for each other inside a step (a lockstep strategy, a group, the workers behind one cache) take
    their turn together; all others one by one.
    """
    strategy = strategies.parse(case.text)
    traits, service = strategy.traits, strategy.traits.servers
    if traits.lockstep or (service and service.cached):
        return 1
    rule = service.rule if service else None
    return rule.teams * rule.server_groups if rule and rule.gathers else case.workers


def _run_placement(case: Case) -> list[tuple[list[float], bytes]]:
    def work(world: World) -> tuple[list[float], bytes]:
        net = double_precision()
        example = make_batch("example", PLACED_SAMPLES)
        optimizer = OPTIMIZERS[case.optimizer](net)
        session = session_of(net, optimizer, loss, world=world, placement=case.text, example=example)
        feed, feeds = session.engine.placed.feed, session.engine.placed.mesh.feeds
        losses = [float(session.step(_share(step, feed, feeds))) for step in range(STEPS)]
        session.close()
        return losses, as_bytes(list(net.parameters()), coarse=False)

    return in_threads(case.workers, work)


def _share(step: int, feed: int, feeds: int) -> Batch:
    inputs, targets = make_batch(str(step), PLACED_SAMPLES)
    return inputs[feed::feeds], targets[feed::feeds]
