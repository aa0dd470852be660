"""Groups of workers: what each of SINGA's topologies comes out as, in results, updates and traffic."""

import functools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands import strategies, telemetry
from manyhands.cluster.world import World
from manyhands.errors import UsageError
from manyhands.servers import shard
from manyhands.servers.consistency import Clocks, Due, Rule
from manyhands.sessions import Session
from manyhands.strategies import Asked
from tests.contracts.test_strategies import (
    CASES,
    OPTIMIZERS,
    Steps,
    assert_close,
    assert_same_bits,
    loss,
    make_net,
    make_steps,
    plainly,
    two_groups,
)
from tests.crew import in_threads

MOMENTUM = functools.partial(two_groups, OPTIMIZERS["momentum"])


def plain_sgd(net: torch.nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def run(
    workers: int,
    strategy: str,
    steps: Steps,
    make: Any = MOMENTUM,
    *,
    optional: bool = False,
    clip: float | None = None,
    scheduled: bool = False,
    servers: int | None = None,
    turns: Sequence[Sequence[int]] = (),
) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Parameters of all workers at the end, and what was counted. With `turns`, in each step those workers that are
    named together step together, one such set after the other; otherwise everyone whenever it can."""
    before = telemetry.totals()
    updates: list[int] = []

    def work(world: World) -> list[Tensor]:
        net = make_net(optional=optional)
        optimizer = make(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
        session = Session(
            net, optimizer, loss, world=world, strategy=strategy, clip_norm=clip, scheduler=scheduler
        )
        for step in steps:
            for turn in turns or [range(workers)]:
                if world.rank in turn:
                    session.step(*step[world.rank])
                if turns:
                    world.host.barrier()
        if session.servers is not None:
            session.servers.settle()
            world.host.barrier()
            if world.rank == 0:
                counted = session.servers.reports()
                updates.append(sum(report.updates for report in counted) // len(session.servers.groups))
        session.close()
        staleness.append(session.staleness)
        return [param.detach().clone() for param in net.parameters()]

    staleness: list[Any] = []
    params = in_threads(workers, work, strategy=strategy, servers=servers)
    after = telemetry.totals()
    counts = {
        name: after.get(name, 0) - before.get(name, 0) for name in ("pushes", "bytes_sent", "shared_bytes")
    }
    return params, {**counts, "updates": sum(updates), "staleness": staleness[0]}


@pytest.mark.parametrize("owners", ["servers", "workers"])
@pytest.mark.parametrize("case", CASES)
def test_one_group_is_one_big_batch_as_all_reduce_is(case: str, owners: str) -> None:
    settings = dict(CASES[case])
    sizes = settings.pop("sizes", lambda step, rank: [6])
    if settings.pop("lonely", False):
        sizes = lambda step, rank: [4] if rank == 2 else []  # noqa: E731
    steps = make_steps(3, sizes)
    ours, _ = run(3, f"worker-groups:groups=1,owners={owners}", steps, **settings)
    theirs, _ = run(3, "all-reduce", steps, **settings)
    want = make_net(optional=settings.get("optional", False))
    for param, value in zip(want.parameters(), theirs[0], strict=True):
        param.data = value
    assert_close(ours[0], want)
    assert_same_bits(ours)


def by_turns(groups: Sequence[Sequence[int]], steps: Steps, clip: float | None) -> torch.nn.Module:
    """The definition where groups take turns: plain PyTorch, one update from each group's samples together."""
    in_turn = [[step[worker] for worker in group] for step in steps for group in groups]
    return plainly(make_net(), MOMENTUM, in_turn, clip=clip)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_groups_that_take_turns_are_plain_pytorch(groups: list[list[int]], clip: float | None) -> None:
    """Batches differ in size, so a group's mean must be weighted; now and then a member has no data."""
    steps = make_steps(4, lambda step, rank: [] if (step, rank) == (2, 0) else [1 + (3 * rank + step) % 7])
    text = f"worker-groups:groups={len(groups)}"
    ours, counted = run(4, text, steps, clip=clip, turns=groups, servers=2)
    if len(groups) == 4:
        in_turn = [[step[worker]] for step in steps for worker in range(4) if step[worker]]
        want = plainly(make_net(), MOMENTUM, in_turn, clip=clip)
        assert counted["updates"] == len(in_turn)
    else:
        want = by_turns(groups, steps, clip)
        assert counted["updates"] == 2 * len(steps)
    assert_close(ours[0], want)
    assert_same_bits(ours)
    assert counted["staleness"]["max"] == 0, "each reads what the one before has left"


def test_one_worker_is_plain_pytorch() -> None:
    steps = make_steps(1)
    for owners in ("servers", "workers"):
        (ours,), _ = run(1, f"worker-groups:groups=1,owners={owners}", steps)
        assert_close(ours, plainly(make_net(), MOMENTUM, steps))


@pytest.mark.parametrize(
    ("groups", "updates"),
    [
        pytest.param(1, 15, id="sandblaster"),
        pytest.param(2, 30, id="between"),
        pytest.param(4, 60, id="downpour"),
    ],
)
def test_traffic_is_the_same_and_updates_grow_with_the_groups(groups: int, updates: int) -> None:
    """Every worker pushes every step whatever the groups are; only what the servers make of it differs."""
    steps = make_steps(4) * 3
    _, counted = run(4, f"worker-groups:groups={groups}", steps, plain_sgd, servers=1)
    assert counted["pushes"] == 4 * len(steps)
    assert counted["updates"] == updates
    assert (counted["staleness"]["max"] > 0) == (groups > 1)
    if groups == 4:
        _, theirs = run(4, "parameter-server:async", steps, plain_sgd, servers=1)
        assert [theirs[name] for name in ("pushes", "updates")] == [counted["pushes"], updates]
        assert theirs["staleness"]["max"] > 0


def test_where_workers_own_the_parameters_nothing_is_pushed() -> None:
    """One group moves what `all-reduce` moves, groups of one worker what `hogwild` moves: nothing but numbers."""
    steps = make_steps(4)
    for groups, name in ((1, "all-reduce"), (4, "hogwild")):
        ours, counted = run(4, f"worker-groups:groups={groups},owners=workers", steps, plain_sgd)
        theirs, expected = run(4, name, steps, plain_sgd)
        assert counted == expected
        assert counted["pushes"] == 0
        assert_same_bits(ours)
        assert_same_bits(theirs)
    turns = [[0], [1], [2], [3]]
    ours, _ = run(4, "worker-groups:groups=4,owners=workers", steps, plain_sgd, turns=turns)
    theirs, _ = run(4, "worker-groups:groups=4", steps, plain_sgd, turns=turns)
    want = make_net()
    for param, value in zip(want.parameters(), theirs[0], strict=True):
        param.data = value
    assert_close(ours[0], want)


@pytest.mark.parametrize("bound", [0, 2])
def test_no_group_is_further_ahead_than_the_bound(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leads: list[int] = []
    note = shard.Shard._note

    def noting(self: shard.Shard, update: "shard._Update") -> None:
        leads.extend(gradient.push.step - self._clocks.floor for gradient in update.gradients)
        note(self, update)

    monkeypatch.setattr(shard.Shard, "_note", noting)
    chance = random.Random(5)
    delays = [[chance.choice([0.0, 0.0, 0.02]) * (rank // 2) for _ in range(15)] for rank in range(4)]
    steps = make_steps(4) * 3

    def work(world: World) -> None:
        net = make_net()
        text = f"worker-groups:between=stale,bound={bound}"
        session = Session(net, plain_sgd(net), loss, world=world, strategy=text)
        for delay, step in zip(delays[world.rank], steps, strict=True):
            time.sleep(delay)
            session.step(*step[world.rank])
        session.close()

    in_threads(4, work, strategy="worker-groups", servers=1)
    assert max(leads) == bound, "the bound was never reached: the test shows nothing"


def test_a_team_waits_for_its_own_only_and_not_for_those_who_left() -> None:
    clocks = Clocks(Rule(gathers=True, teams=2), range(4))
    assert clocks.push(0, 0, 7) == []
    assert clocks.push(2, 0, 7) == [], "worker 2 is of the other team"
    assert clocks.push(1, 0, 7) == [Due(7, (0, 1))]
    assert clocks.leave(3) == [Due(7, (2,))]
    assert [clocks.team(worker) for worker in range(4)] == [0, 0, 1, 1]


def test_in_place_a_team_updates_when_its_own_have_finished() -> None:
    clocks = Clocks(Rule(gathers=True, teams=2), range(4), in_place=True)
    assert [clocks.push(worker, 0, 7) for worker in range(4)] == [[]] * 4
    assert clocks.finish(2, 0) == []
    assert clocks.finish(0, 0) == []
    assert clocks.finish(3, 0) == [Due(7, (2, 3))]
    assert clocks.finish(1, 0) == [Due(7, (0, 1))]
    clocks.push(0, 1, 7)
    assert clocks.leave(1) == [], "worker 0 has not finished its backward pass"
    assert clocks.finish(0, 1) == [Due(7, (0,))]


@pytest.mark.parametrize(
    ("text", "asked", "words"),
    [
        ("worker-groups:groups=3", Asked(workers=4, servers=1), r"4 ÷ 3 leaves 1\); use --workers 6"),
        ("worker-groups", Asked(workers=4), "needs --servers 1 or more"),
        ("worker-groups:owners=workers", Asked(workers=4), "2 groups of 2 workers need servers.*groups=4"),
        ("worker-groups:owners=workers", Asked(workers=2, hosts=2), "memory of one host, and there are 2"),
        ("worker-groups:groups=2", Asked(workers=2, servers=1, optimizer="lbfgs"), "L-BFGS"),
        ("worker-groups:server_groups=2", Asked(workers=2, servers=2), "one group of servers"),
        ("worker-groups:between=often", Asked(workers=2, servers=2), "often"),
        ("worker-groups:owners=nobody", Asked(workers=2, servers=2), "nobody"),
        ("worker-groups:groups=0", Asked(workers=2, servers=2), "at least 1"),
        ("worker-groups:bound=3", Asked(workers=2, servers=2), "between=stale"),
        ("worker-groups:between=stale,owners=workers", Asked(workers=2), "groups that can wait"),
    ],
)
def test_what_cannot_run_is_refused_with_the_arithmetic(text: str, asked: Asked, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        strategies.admit(strategies.parse(text), asked)
