"""Every worker of the only replica dies in the middle of its update: what is left of each part can be taken over."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.engine import build
from manyhands.engine.session import Session
from manyhands.errors import TornUpdate
from manyhands.replica.optimizer.descent import MOMENTUM, PARAMS, SCRATCH
from manyhands.replica.part_place import PartPlace
from tests.faults import registered
from tests.sessions import session_of
from tests.threads import in_threads

WORKERS, FATAL_STEP = 2, 3
PLACEMENTS = ["pipeline:microbatches=2,split=3", "tensor", "sharded"]
RATE = 0.01


class Dies(Exception):
    """In place of a process."""


def made(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    width = 600 if optimizer == "adam, large" else 24
    model = nn.Sequential(
        *(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh()),
        *(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)),
    )
    if optimizer == "adafactor":
        return model, torch.optim.Adafactor(model.parameters(), lr=RATE)
    if optimizer.startswith("adam"):
        return model, torch.optim.Adam(model.parameters(), lr=RATE)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(session: Session, steps: int) -> None:
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 6, generator=generator)
        session.step((inputs, torch.randint(0, 3, (16,), generator=generator)))


def contents(replica: Any) -> list[Tensor]:
    """Parameters, optimizer state, buffers."""
    known = replica.updates.export()
    numbers = [torch.as_tensor(v) for s in known.values() for v in s.values() if v is not None]
    vectors = [replica.params, *replica.updates.vectors.values(), *replica.part.buffers()]
    return [value.detach().clone() for value in (*vectors, *numbers, *replica.kept.values())]


def arm(session: Session, when: str) -> None:
    """In the fatal step the worker dies with half of a span written."""
    replica: Any = session.engine.replica
    real, calls = replica.updates._step, itertools.count()
    log = getattr(replica.path, "inner", replica.path).log
    note = log._note

    def is_fatal() -> bool:
        return bool(session.steps + 1 == FATAL_STEP and next(calls) == 0)

    def half_a_step(twin: torch.optim.Optimizer) -> None:
        params = [param for group in twin.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        real(twin)
        if is_fatal():
            for old, param in zip(before, params, strict=True):
                param[: len(param) // 2] = old[: len(param) // 2]
            raise Dies

    def half_a_pass(owner: int, span: Any, stage: int) -> None:
        note(owner, span, stage)
        if stage == {"momentum": MOMENTUM, "scratch": SCRATCH, "params": PARAMS}.get(when) and is_fatal():
            descent = replica.updates.begun_descent(span)
            target = {MOMENTUM: descent.momentum, SCRATCH: log.scratch, PARAMS: descent.params}[stage]
            target[: len(descent.params) // 2] = float("nan")
            raise Dies

    if when == "update":
        replica.updates._step = half_a_step
    else:
        log._note = half_a_pass


CASES = [
    *((placement, "adam", "update", None) for placement in PLACEMENTS),
    *((placement, "adam", "update", 0.05) for placement in PLACEMENTS),
    *((PLACEMENTS[0], "momentum", when, None) for when in ("momentum", "scratch", "params")),
    (PLACEMENTS[0], "adafactor", "update", None),
    *(("pipeline:microbatches=2,split=2", "adam, large", "update", limit) for limit in (None, 0.05)),
]


@pytest.mark.parametrize(("placement", "optimizer", "when", "clip_norm"), CASES)
def test_an_update_is_finished_by_the_worker_that_takes_the_part_over(
    placement: str, optimizer: str, when: str, clip_norm: float | None
) -> None:
    """With the rate of that step, although the schedule of the new worker's script has another one."""
    models = [[made(optimizer) for _ in range(WORKERS)] for _ in range(2)]

    def work(world: World, *, dies: bool) -> tuple[list[Tensor], list[Tensor]]:
        model, own = models[dies][world.rank]
        session = session_of(
            model, own, loss, world=world, placement=placement, logged=True, clip_norm=clip_norm,
            example=(torch.ones(16, 6), torch.zeros(16, dtype=torch.int64)),
        )  # fmt: skip
        replica, before = session.engine.replica, FATAL_STEP - 1
        if not dies:
            train(session, before)
            then = contents(replica)
            expected = after_one_more(session)
            session.close()
            return then, expected
        arm(session, when)
        with pytest.raises(Dies):
            train(session, FATAL_STEP)
        replica.memory.decide(FATAL_STEP, parts=WORKERS)
        own.param_groups[0]["lr"] = 7.0
        return [], taken_over(session, world)

    alive = in_threads(WORKERS, lambda world: work(world, dies=False))
    dead = in_threads(WORKERS, lambda world: work(world, dies=True))
    for (before, expected), (_, found) in zip(alive, dead, strict=True):
        assert not torch.equal(before[0], expected[0])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def after_one_more(session: Session) -> list[Tensor]:
    generator = torch.Generator().manual_seed(FATAL_STEP)
    inputs = torch.randn(16, 6, generator=generator)
    session.step((inputs, torch.randint(0, 3, (16,), generator=generator)))
    return contents(session.engine.replica)


def taken_over(session: Session, world: World) -> list[Tensor]:
    """What is found by a worker of the next generation, which has divided the model in the same way."""
    engine = session.engine
    engine.replica.let_go()  # the garbage collector does not see what autograd's hooks hold
    world.rank_info = dataclasses.replace(world.rank_info, generation=1)
    with engine.placed.at_work():
        found = build.revive(
            engine.replica.part,
            engine.training,
            engine.settings,
            engine.traits,
            world,
            engine.placed,
            place=PartPlace(world.host.arena.fd, 0, engine.placed.part_number),
        )
        return contents(found)


def test_a_step_that_does_not_count_leaves_no_trace() -> None:
    """The workers die in the pass, when buffers have changed, and gradients are there."""
    models = [made("adam") for _ in range(WORKERS)]

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model, own = models[world.rank]
        session = session_of(model, own, loss, world=world, placement="tensor", logged=True)
        train(session, 2)
        then, gate = contents(session.engine.replica), session.engine.replica.path.gate
        made_copies = gate.open

        def die() -> None:
            made_copies()
            raise Dies

        gate.open = die  # type: ignore[method-assign]
        with pytest.raises(Dies):
            after_one_more(session)
        assert any(
            not torch.equal(one, other)
            for one, other in zip(contents(session.engine.replica), then, strict=True)
        ), "the statistics have changed"
        session.engine.replica.memory.decide(2, parts=WORKERS)
        return then, taken_over(session, world)

    for then, found in in_threads(WORKERS, work):
        assert all(torch.equal(one, other) for one, other in zip(then, found, strict=True))


def test_what_was_not_complete_cannot_be_taken_over() -> None:
    models = [made("adam") for _ in range(WORKERS)]

    def work(world: World) -> None:
        model, own = models[world.rank]
        session = session_of(model, own, loss, world=world, placement="tensor", logged=True)
        memory: Any = session.engine.replica.memory
        memory._place.begin(0, 1)
        with pytest.raises(TornUpdate, match=f"part {world.rank} of the replica"):
            taken_over(session, world)

    in_threads(WORKERS, work)


def is_copied(strategy: str) -> bool:
    """Whether the optimizer's undo log is not enough for it."""
    traits = strategies.parse(strategy).traits
    return traits.parts_outlive and traits.lockstep and not traits.logs_parts


COPIED = [text for text in registered.every_strategy() if is_copied(text)]


@pytest.mark.parametrize(
    ("strategy", "placement", "when"),
    [
        *zip(COPIED, itertools.cycle(PLACEMENTS), itertools.repeat("after")),
        ("diloco:period=2", "sharded", "within"),
    ],
)
def test_a_copy_is_found_of_whatever_counts_and_a_strategy_keeps(
    strategy: str, placement: str, when: str
) -> None:
    """The workers die in their third step, when they have made the copy of it, or half of it."""
    models = [made("adam") for _ in range(WORKERS)]

    def work(world: World) -> None:
        model, own = models[world.rank]
        session = session_of(
            model, own, loss, world=world, placement=placement, strategy=strategy, logged=True,
            example=(torch.ones(16, 6), torch.zeros(16, dtype=torch.int64)),
        )  # fmt: skip
        train(session, 2)
        engine, copies = session.engine, session.engine.generation.part_copies
        before, commits = contents(engine.replica), engine.progress.commits
        name = "make" if when == "after" else "_write"
        real = getattr(copies, name)

        def die(*given: Any) -> None:
            if when == "within":
                given = given[0], dict(list(given[1].items())[:1])
            real(*given)
            raise Dies

        setattr(copies, name, die)
        with pytest.raises(Dies):
            after_one_more(session)
        after = contents(engine.replica)
        for counted, expected in ((commits, before), (commits + 1, after))[: 2 if when == "after" else 1]:
            world.host.barrier()
            copies.decide(counted)
            world.host.barrier()
            found = taken_over(session, world)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    in_threads(WORKERS, work)
