"""L-BFGS on servers is torch's, whichever worker computes what; a fast one computes more."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.errors import UnknownName, UsageError
from manyhands.job import optimizers
from manyhands.job.plan import Cluster, Plan, Train
from manyhands.replica.portions import pool
from manyhands.servers.process.vectors import Vectors
from tests.contracts.test_strategies import (
    Batch,
    Net,
    Steps,
    assert_close,
    loss,
    make_net,
    make_steps,
    plainly,
)
from tests.sessions import session_of
from tests.threads import in_threads

SETTINGS: dict[str, dict[str, Any]] = {
    "fixed steps": {"lr": 0.3, "max_iter": 5},
    "strong wolfe": {"max_iter": 6, "line_search_fn": "strong_wolfe"},
    "a short history": {"lr": 0.5, "max_iter": 8, "history_size": 3, "line_search_fn": "strong_wolfe"},
    "few evaluations": {"max_iter": 6, "max_eval": 4, "line_search_fn": "strong_wolfe"},
    "soon content": {"lr": 0.3, "max_iter": 8, "tolerance_grad": 0.05},
}


def in_one_process(steps: Steps, settings: dict[str, Any], clip: float | None = None) -> nn.Module:
    return plainly(make_net(), lambda net: LBFGS(net.parameters(), **settings), steps, clip=clip)


def on_servers(
    workers: int,
    servers: int,
    steps: Steps,
    settings: dict[str, Any],
    *,
    strategy: str = "sandblaster:portion=4",
    clip: float | None = None,
    measured: Callable[[nn.Module, Batch], Tensor] = loss,
) -> list[list[Tensor]]:
    def work(world: World) -> list[Tensor]:
        net = make_net(seed=3 + world.rank)
        optimizer = LBFGS(net.parameters(), **settings)
        with session_of(net, optimizer, measured, world=world, strategy=strategy, clip_norm=clip) as session:
            for step in steps:
                session.step(*step[world.rank])
        return [param.detach().clone() for param in net.parameters()]

    return in_threads(workers, work, servers=servers)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("case", SETTINGS)
def test_it_is_the_l_bfgs_of_torch(case: str, workers: int, servers: int) -> None:
    steps = make_steps(workers, lambda step, rank: [6 + rank])
    ours = on_servers(workers, servers, steps, SETTINGS[case])
    want = in_one_process(steps, SETTINGS[case])
    for params in ours:
        assert_close(params, want, 1e-6)
    moved = [(a - b).norm() for a, b in zip(ours[0], make_net().parameters(), strict=True)]
    assert min(moved) > 1e-3, "the test shows nothing"


@pytest.mark.parametrize(
    "sizes",
    [lambda step, rank: [3, 5][: 1 + (step + rank) % 2], lambda step, rank: [] if rank == 1 else [9]],
    ids=["accumulated", "a worker without data"],
)
def test_whatever_the_workers_bring(sizes: Callable[[int, int], list[int]]) -> None:
    steps = make_steps(3, sizes)
    settings = SETTINGS["strong wolfe"]
    ours = on_servers(3, 2, steps, settings, clip=0.1)
    assert_close(ours[2], in_one_process(steps, settings, clip=0.1), 1e-6)


def test_a_slow_worker_takes_fewer_portions_and_the_result_is_the_same() -> None:
    """The slow one sleeps in its first portion until the others have computed all the others of the evaluation."""
    computed: Counter[int] = Counter()
    rank = threading.local()
    count = 12

    def slowed(model: nn.Module, batch: Batch) -> Tensor:
        computed[rank.value] += 1
        if rank.value == 1:
            time.sleep(0.05)
        return loss(model, batch)

    steps = make_steps(3, lambda step, rank: [8])[:1]

    def work(world: World) -> list[Tensor]:
        rank.value = world.rank
        net = make_net()
        optimizer = LBFGS(net.parameters(), lr=0.3, max_iter=4)
        with session_of(net, optimizer, slowed, world=world, strategy="sandblaster:portion=2") as session:
            session.step(*steps[0][world.rank])
        return [param.detach().clone() for param in net.parameters()]

    ours = in_threads(3, work, servers=1)
    assert computed.total() == 4 * count, "each portion once in each of 4 evaluations"
    assert 0 < computed[1] < computed[0]
    assert computed[1] < computed[2]
    for params in ours:
        assert_close(params, in_one_process(steps, {"lr": 0.3, "max_iter": 4}), 1e-6)


def test_no_process_holds_the_history_and_the_servers_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each vector every server has its part alone, and not more vectors than L-BFGS uses."""
    made: list[Vectors] = []
    begin = Vectors.__init__

    def beginning(self: Vectors, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        made.append(self)

    monkeypatch.setattr(Vectors, "__init__", beginning)
    history = 3
    on_servers(2, 2, make_steps(2) * 3, {"lr": 0.1, "max_iter": 6, "history_size": history})
    length = sum(param.numel() for param in make_net().parameters())
    for one in made:
        parts = one._parts
        assert 2 * history < len(parts) <= 2 * history + 8
        assert sum(part.numel() for part in parts["params"]) < 0.75 * length


def test_history_lives_through_a_pause() -> None:
    steps = make_steps(2)
    settings = SETTINGS["fixed steps"]

    def work(world: World) -> list[Tensor]:
        net = make_net()
        with session_of(
            net, LBFGS(net.parameters(), **settings), loss, world=world, strategy="sandblaster"
        ) as session:
            for step in steps:
                session.step(*step[world.rank])
                (batch,) = step[0]
                session.evaluate(list(zip(*batch, strict=True)))
        return [param.detach().clone() for param in net.parameters()]

    assert_close(in_threads(2, work, servers=2)[1], in_one_process(steps, settings), 1e-6)


def test_batches_of_any_structure_are_cut_alike() -> None:
    batch = {"inputs": [torch.arange(10).view(5, 2), torch.arange(5)], "weight": torch.tensor(2.0), "k": 3}
    portions = pool([(batch, 5), ((torch.ones(1),), 1)], Comm(), 2)
    assert [samples for _, samples in portions] == [2, 2, 1, 1]
    assert torch.equal(torch.cat([portion["inputs"][0] for portion, _ in portions[:3]]), batch["inputs"][0])  # type: ignore[index]
    assert portions[1][0]["weight"] == 2
    assert portions[1][0]["k"] == 3
    assert isinstance(portions[3][0], tuple)
    with pytest.raises(UsageError, match="str cannot be divided"):
        pool([(("a", "b"), 2)], Comm(), 1)


def test_what_cannot_run_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="portion=0: it must be at least 1"):
        strategies.parse("sandblaster:portion=0")
    cluster = Cluster(workers=2, servers=1)
    with pytest.raises(UsageError, match="needs --servers"):
        Plan(strategy="sandblaster", cluster=Cluster(workers=2)).check()
    with pytest.raises(UsageError, match="the optimizer lbfgs alone, not with sgd"):
        Plan(strategy="sandblaster", cluster=cluster, train=Train(optimizer="sgd:lr=0.1")).check()
    with pytest.raises(UsageError, match="cannot run L-BFGS"):
        Plan(strategy="parameter-server", cluster=cluster, train=Train(optimizer="lbfgs")).check()


def test_it_trains_with_l_bfgs_where_nobody_names_an_optimizer() -> None:
    plan, why = Plan(strategy="sandblaster", cluster=Cluster(workers=4, servers=1)).on_fair_terms()
    made = optimizers.make_optimizer(plan.train.optimizer or "", Net())
    assert isinstance(made, LBFGS)
    assert made.param_groups[0]["line_search_fn"] == "strong_wolfe"
    assert isinstance(made.param_groups[0]["max_iter"], int)
    assert (plan.train.warm_up, why) == (0.0, "lbfgs chooses the length of its steps itself")
    with pytest.raises(UnknownName, match="strong_wolfe"):
        optimizers.make_optimizer("lbfgs:line_search_fn=weak", Net())
