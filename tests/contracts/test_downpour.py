"""Downpour is its paper: with one worker to the last digit, with several in what travels and how stale it gets."""

import functools
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from manyhands.job import learning_rate
from manyhands.job.plan import Cluster, Plan, Train
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.worker import client
from tests.contracts.test_sessions import Numbered
from tests.contracts.test_strategies import (
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
from tests.sessions import session_of
from tests.threads import in_threads


def trained(world: World, strategy: str, steps: Steps, optimizer: str = "momentum") -> list[Tensor]:
    net = make_net(optional=True)
    made = two_groups(OPTIMIZERS[optimizer], net)
    with session_of(net, made, loss, world=world, strategy=strategy) as session:
        for step in steps:
            session.step(*step[world.rank])
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "adafactor"])
def test_one_worker_that_fetches_and_pushes_in_every_step_is_plain_pytorch(optimizer: str) -> None:
    steps = make_steps(1)
    (ours,) = in_threads(1, lambda world: trained(world, "downpour", steps, optimizer), servers=2)
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    assert_close(ours, plainly(make_net(optional=True), make, steps), 1e-12)


def as_in_the_paper(steps: Steps, fetch: int, push: int) -> nn.Module:
    """The client's procedure of the paper, with servers that are a model beside it."""
    servers, copy = make_net(optional=True), make_net(optional=True)
    optimizer = two_groups(OPTIMIZERS["momentum"], servers)
    rates = {id(param): group["lr"] for group in optimizer.param_groups for param in group["params"]}
    for number, ((batches,)) in enumerate(steps):
        if number % fetch == 0:
            copy.load_state_dict(servers.state_dict())
        copy.zero_grad()
        for batch in batches:
            loss(copy, batch).backward()
        with torch.no_grad():
            for own, far in zip(copy.parameters(), servers.parameters(), strict=True):
                if own.grad is not None:
                    far.grad = own.grad.clone() if far.grad is None else far.grad + own.grad
                    own -= rates[id(far)] * own.grad
        if (number + 1) % push == 0 or number == len(steps) - 1:
            optimizer.step()
            optimizer.zero_grad()
    return servers


@pytest.mark.parametrize(("fetch", "push"), [(1, 3), (3, 1), (2, 2), (4, 3)])
def test_one_worker_is_the_procedure_of_the_paper(fetch: int, push: int) -> None:
    """Parameters that only some batches use included: they are updated where any accrued gradient is of them."""
    steps = [*make_steps(1), *make_steps(1, lambda step, rank: [3 + step])]
    strategy = f"downpour:fetch={fetch},push={push}"
    (ours,) = in_threads(1, lambda world: trained(world, strategy, steps), servers=3)
    assert_close(ours, as_in_the_paper(steps, fetch, push), 1e-12)


@pytest.mark.parametrize("settings", ["", ":fetch=4,push=3"])
def test_workers_learn_from_stale_gradients_and_end_alike(settings: str) -> None:
    data = Numbered(96)

    def work(world: World) -> tuple[float, float, int, list[Tensor]]:
        net = make_net()
        session = session_of(
            net,
            torch.optim.Adagrad(net.parameters(), lr=0.02),
            loss,
            world=world,
            strategy=f"downpour{settings}",
        )
        before = session.evaluate(data)["loss"]
        for _ in range(12):
            for batch in session.batches(data, batch_size=4):
                time.sleep(0.001 * world.rank)  # the first pushes in between the others' fetch and push
                session.step(batch)
        after = session.evaluate(data)["loss"]
        session.close()
        staleness = session.summary()["staleness"]
        assert staleness["mean"] > 0
        assert sum(staleness["histogram"].values()) > 0
        return before, after, staleness["max"], [param.detach().clone() for param in net.parameters()]

    results = in_threads(3, work, servers=2)
    for before, after, stalest, _ in results:
        assert after < 0.7 * before
        assert stalest > 0
    assert_same_bits([params for *_, params in results])


@pytest.mark.parametrize(("fetch", "push"), [(1, 1), (4, 1), (1, 4), (6, 4)])
def test_traffic_falls_as_the_periods_grow(fetch: int, push: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    send, pull = client.Servers._send, client.Servers.pull

    def sending(self: client.Servers, group: SpanGroup, arrived: Sequence[int]) -> None:
        counts["pushes"] += self.worker == 0
        send(self, group, arrived)

    def pulling(self: client.Servers, *, whole: bool = True) -> None:
        counts["pulls"] += self.worker == 0
        pull(self, whole=whole)

    monkeypatch.setattr(client.Servers, "_send", sending)
    monkeypatch.setattr(client.Servers, "pull", pulling)
    steps = make_steps(2, lambda step, rank: [2]) * 5
    groups = in_threads(
        2, lambda world: _groups(world, f"downpour:fetch={fetch},push={push}", steps), servers=2
    )
    assert counts["pushes"] == groups[0] * -(-len(steps) // push)
    assert counts["pulls"] == 2 + -(-len(steps) // fetch), "one at the start, one at the end"


def _groups(world: World, strategy: str, steps: Steps) -> int:
    net = make_net()
    session = session_of(
        net, torch.optim.SGD(net.parameters(), lr=0.01), loss, world=world, strategy=strategy
    )
    for step in steps:
        session.step(*step[world.rank])
    session.close()
    assert session.engine.generation.servers is not None
    return len(session.engine.generation.servers.groups)


def test_what_cannot_run_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="fetch=0: it must be at least 1"):
        strategies.parse("downpour:fetch=0")
    plan = Plan(strategy="downpour", cluster=Cluster(workers=2))
    with pytest.raises(UsageError, match="needs --servers"):
        plan.check()
    plan = Plan(
        strategy="downpour", cluster=Cluster(workers=2, servers=1), train=Train(optimizer="lbfgs:max_iter=4")
    )
    with pytest.raises(UsageError, match="evaluates the loss several times"):
        plan.check()


def test_it_trains_with_adagrad_where_nobody_names_an_optimizer() -> None:
    plan, why = Plan(strategy="downpour", cluster=Cluster(workers=4, servers=1)).on_fair_terms()
    assert plan.train.optimizer == "adagrad:lr=0.005"
    assert "the 0.02 of one worker divided by 4, since gradients are about 3 updates late" in why
    assert learning_rate.terms("transformer", strategies.parse("downpour"), 4).optimizer.startswith(
        "adagrad:"
    )
