"""Groups of workers: what each of SINGA's topologies comes out as, in results, updates and traffic."""

import functools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import strategies, telemetry
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from manyhands.servers.process.group_update import GroupUpdate
from manyhands.servers.process.update_counters import UpdateCounters
from manyhands.servers.protocol.consistency import Clocks, Consistency, Due
from manyhands.servers.worker import reports
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
    plain_sgd,
    plainly,
    two_groups,
)
from tests.sessions import session_of
from tests.threads import in_threads

MOMENTUM = functools.partial(two_groups, OPTIMIZERS["momentum"])


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
    meet: bool = False,
) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Parameters of all workers at the end, and what was counted. With `turns`, in each step those workers that are
    named together step together, one such set after the other; otherwise everyone whenever it can. With `meet`, server
    groups meet after each turn."""
    before = telemetry.totals()
    updates: list[int] = []
    groups: list[int] = []

    def work(world: World) -> list[Tensor]:
        net = make_net(optional=optional)
        optimizer = make(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
        session = session_of(
            net, optimizer, loss, world=world, strategy=strategy, clip_norm=clip, scheduler=scheduler
        )
        for step in steps:
            for turn in turns or [range(workers)]:
                if world.rank in turn:
                    session.step(*step[world.rank])
                if turns:
                    if session.engine.generation.servers is not None:
                        session.engine.generation.servers.settle()
                    world.host.barrier()
                if meet and session.engine.generation.servers:
                    session.engine.generation.servers.meet()
                    world.host.barrier()
        if session.engine.generation.servers is not None:
            session.engine.generation.servers.settle()
            world.host.barrier()
            if session.engine.generation.servers.leads:
                counted = reports.fetch(session.engine.generation.servers)
                groups.append(len(session.engine.generation.servers.groups))
                updates.append(sum(report.updates for report in counted) // groups[-1])
        session.close()
        staleness.append(session.engine.totals.staleness if session.engine.totals else None)
        return [param.detach().clone() for param in net.parameters()]

    staleness: list[Any] = []
    params = in_threads(workers, work, strategy=strategy, servers=servers)
    after = telemetry.totals()
    counts = {
        name: after.get(name, 0) - before.get(name, 0)
        for name in ("pushes", "exchanges", "bytes_sent", "shared_bytes")
    }
    more = {"updates": sum(updates), "staleness": staleness[0], "groups": sum(groups)}
    return params, counts | more


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


@pytest.mark.parametrize(("groups", "updates"), [(1, 15), (2, 30), (4, 60)])
def test_traffic_is_the_same_and_updates_grow_with_the_groups(groups: int, updates: int) -> None:
    """Every worker pushes every step whatever the groups are; only what the servers make of it differs."""
    steps = make_steps(4) * 3
    _, counted = run(4, f"worker-groups:groups={groups}", steps, plain_sgd, servers=1)
    assert counted["pushes"] == 4 * len(steps)
    assert counted["updates"] == updates
    assert (counted["staleness"]["max"] > 0) == (groups > 1)


EACH_ALONE = [[0], [1], [2], [3]]


def along_the_gradient(steps: Steps) -> float:
    """Σ |g| of the first step, by which L-BFGS divides its rate if it is more than 1."""
    before, after = make_net(), plainly(make_net(), plain_sgd, steps)
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return max(1.0, sum(float((one - two).detach().abs().sum()) for one, two in pairs) / 0.1)


@pytest.mark.parametrize(
    ("settings", "named", "turns"),
    [
        pytest.param("groups=1", "parameter-server", (), id="Sandblaster, as the set-up of processes"),
        pytest.param("groups=1,owners=workers", "all-reduce", (), id="AllReduce"),
        pytest.param("groups=4", "downpour", EACH_ALONE, id="Downpour"),
        pytest.param(
            "groups=4", "parameter-server:async", EACH_ALONE, id="Downpour, as most servers have it"
        ),
        pytest.param("groups=4,owners=workers", "hogwild", EACH_ALONE, id="Hogwild"),
    ],
)
def test_the_topologies_of_singa_move_and_compute_what_their_namesakes_do(
    settings: str, named: str, turns: Sequence[Sequence[int]]
) -> None:
    """Where nobody waits, workers take turns here: else no two runs are alike."""
    steps = make_steps(4, lambda step, rank: [2 + (step + rank) % 3])
    ours, counted = run(4, f"worker-groups:{settings}", steps, turns=turns)
    theirs, expected = run(4, named, steps, turns=turns)
    if counted["groups"]:  # what servers report goes through the host's memory too, as text of some length
        counted["shared_bytes"] = expected["shared_bytes"] = 0
    assert counted == expected, "pushes, bytes, updates and staleness"
    assert_same_bits([ours[0], *ours[1:], *theirs])
    assert counted["pushes"] == 4 * len(steps) * counted["groups"], "none where workers own the parameters"
    free, counted = run(4, f"worker-groups:{settings}", steps)
    assert_same_bits(free)
    assert counted["updates"] == expected["updates"]


def test_the_sandblaster_of_singa_is_that_of_distbelief_but_for_the_optimizer() -> None:
    """One step of L-BFGS with one evaluation goes along the gradient: the same sum, on the same servers."""
    steps = make_steps(4)[:1]
    length = along_the_gradient(steps)
    ours, counted = run(4, "worker-groups:groups=1", steps, plain_sgd)

    def one_evaluation(net: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(net.parameters(), lr=0.1 * length, max_iter=1)

    theirs, expected = run(4, "sandblaster", steps, one_evaluation)
    want = make_net()
    for param, value in zip(want.parameters(), theirs[0], strict=True):
        param.data = value
    assert_close(ours[0], want, 1e-12)
    assert 0 < expected["pushes"] <= counted["pushes"], "a fast worker may take the portion of a slow one"


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], EACH_ALONE])
def test_server_groups_that_meet_after_every_turn_have_one_set_of_parameters(
    groups: list[list[int]], clip: float | None
) -> None:
    """Plain PyTorch, with an optimizer for each server group over the same parameters."""
    steps = make_steps(4, lambda step, rank: [1 + (3 * rank + step) % 7])
    text = f"worker-groups:groups={len(groups)},server_groups=2,exchange_every=1000"
    ours, counted = run(4, text, steps, clip=clip, turns=groups, servers=4, meet=True)
    want = make_net()
    optimizers = [MOMENTUM(want), MOMENTUM(want)]
    for step in steps:
        for group in groups:
            batches = [batch for worker in group for batch in step[worker]]
            total = sum(len(targets) for _, targets in batches)
            want.zero_grad()
            for batch in batches:
                (loss(want, batch) * (len(batch[1]) / total)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(want.parameters(), clip)
            optimizers[group[0] // 2].step()
    assert_close(ours[0], want)
    assert_same_bits(ours)
    assert counted["updates"] == len(groups) * len(steps)


def test_server_groups_move_no_more_than_one_and_meet_as_often_as_they_should() -> None:
    """Workers push as much as with one server group; between server groups goes a fraction of it."""
    steps = make_steps(4) * 3
    settings = "groups=4,server_groups={},exchange_every=5"
    _, one = run(4, f"worker-groups:{settings.format(1)}", steps, plain_sgd, servers=1)
    ours, two = run(4, f"worker-groups:{settings.format(2)}", steps, plain_sgd, servers=2)
    assert_same_bits(ours)
    assert one["exchanges"] == 0
    assert (one["pushes"], one["updates"]) == (two["pushes"], two["updates"]) == (60, 60)
    assert 2 < two["exchanges"] <= 30 // 5 + 2, "half of the updates are away from home; two more at the end"


@pytest.mark.processes
def test_server_groups_go_on_from_a_checkpoint_with_the_state_of_the_first(tmp_path: Path) -> None:
    text = "worker-groups:groups=2,server_groups=2,exchange_every=2"
    steps = make_steps(4)

    def state(session: Session) -> list[Tensor]:
        assert session.engine.generation.servers is not None
        return [
            session.engine.replica.params.clone(),
            session.engine.generation.servers.vector("momentum_buffer").clone(),
        ]

    def save(world: World) -> list[Tensor]:
        net = make_net(seed=world.rank)
        with session_of(net, MOMENTUM(net), loss, world=world, strategy=text) as session:
            for step in steps:
                session.step(*step[world.rank])
            session.save(tmp_path)
            return state(session)

    def resume(world: World) -> list[Tensor]:
        net = make_net(seed=9)
        with session_of(net, MOMENTUM(net), loss, world=world, strategy=text) as session:
            session.resume(tmp_path)
            found = state(session)
            session.step(*steps[0][world.rank])
            return found

    saved = in_threads(4, save, servers=4)
    assert_same_bits([params for params, _ in saved])
    assert not torch.equal(saved[0][1], saved[3][1]), "every server group has a momentum of its own"
    assert_same_bits([saved[0], *in_threads(4, resume, servers=4)])


@pytest.mark.parametrize("bound", [0, 2])
def test_no_group_is_further_ahead_than_the_bound(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leads: list[int] = []
    note = UpdateCounters.note

    def noting(self: UpdateCounters, update: GroupUpdate, version: int) -> None:
        leads.extend(gradient.push.step - update.clocks.floor for gradient in update.gradients)
        note(self, update, version)

    monkeypatch.setattr(UpdateCounters, "note", noting)
    chance = random.Random(5)
    delays = [[chance.choice([0.0, 0.0, 0.02]) * (rank // 2) for _ in range(15)] for rank in range(4)]
    steps = make_steps(4) * 3

    def work(world: World) -> None:
        net = make_net()
        text = f"worker-groups:between=stale,bound={bound}"
        session = session_of(net, plain_sgd(net), loss, world=world, strategy=text)
        for delay, step in zip(delays[world.rank], steps, strict=True):
            time.sleep(delay)
            session.step(*step[world.rank])
        session.close()

    in_threads(4, work, strategy="worker-groups", servers=1)
    assert max(leads) == bound, "the bound was never reached: the test shows nothing"


def test_a_team_waits_for_its_own_only_and_not_for_those_who_left() -> None:
    clocks = Clocks(Consistency(gathers=True, teams=2), range(4))
    assert clocks.push(0, 0, 7) == []
    assert clocks.push(2, 0, 7) == [], "worker 2 is of the other team"
    assert clocks.push(1, 0, 7) == [Due(7, (0, 1))]
    assert clocks.leave(3) == [Due(7, (2,))]
    assert [clocks.team(worker) for worker in range(4)] == [0, 0, 1, 1]


def test_in_place_a_team_updates_when_its_own_have_finished() -> None:
    clocks = Clocks(Consistency(gathers=True, teams=2), range(4), in_place=True)
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
        (
            "worker-groups:groups=2,server_groups=2",
            Asked(workers=2, servers=3),
            r"3 servers cannot be divided among 2 server groups \(3 ÷ 2 leaves 1\)",
        ),
        (
            "worker-groups:groups=3,server_groups=2",
            Asked(workers=3, servers=2),
            r"3 groups of workers cannot be divided among 2 server groups \(3 ÷ 2 leaves 1\)",
        ),
        ("worker-groups:server_groups=0", Asked(workers=2, servers=2), "at least 1"),
        ("worker-groups:exchange_every=0", Asked(workers=2, servers=2), "at least 1"),
        ("worker-groups:server_groups=2,owners=workers", Asked(workers=2), "needs owners=servers"),
        ("worker-groups:server_groups=2,between=stale", Asked(workers=2, servers=2), "between=async"),
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
