"""What a script changes in its optimizer and model between two steps: it has the effect that it has in one process, or
is refused, or warned of."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.sessions import session_of
from tests.threads import in_threads

Batch = tuple[Tensor, Tensor]
Change = Callable[[nn.Sequential, Any], None]
Make = Callable[[nn.Sequential], Optimizer]

STEPS, AT = 6, 3
SYNCHRONOUS = ("all-reduce", "all-reduce:topology=ring", "parameter-server:sync")


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator).double() * 0.3)
    return net


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(8, 4, generator=generator).double() for _ in range(STEPS)]
    return [(one, one.sum(1, keepdim=True)) for one in inputs]


BATCHES = make_batches()


def values(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def plainly(make: Make, change: Change) -> tuple[list[Tensor], Optimizer]:
    net = make_net()
    optimizer = make(net)
    for number, batch in enumerate(BATCHES):
        if number == AT:
            change(net, optimizer)
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    return values(net), optimizer


def trained(make: Make, change: Change, world: World, strategy: str) -> tuple[list[Tensor], Optimizer]:
    net = make_net()
    optimizer = make(net)
    session = session_of(net, optimizer, loss, world=world, strategy=strategy)
    for number, batch in enumerate(BATCHES):
        if number == AT:
            change(net, optimizer)
        session.step(tuple(part[world.rank :: world.size] for part in batch))
    session.close()
    return values(net), optimizer


def adam(net: nn.Module) -> Optimizer:
    return Adam(net.parameters(), lr=0.02)


def whole_numbers(net: nn.Module) -> Optimizer:
    """As people write them: `lr=1`, and what PyTorch has by default is `weight_decay=0`."""
    return SGD(net.parameters(), lr=1, momentum=0.5, weight_decay=0)


def two_groups(net: nn.Sequential) -> Optimizer:
    return SGD([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.01}], lr=0.1)


def setting(**settings: Any) -> Change:
    def change(net: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0].update(settings)

    return change


def take_bias_out(net: nn.Sequential, optimizer: Any) -> None:
    net[2].bias = None


EFFECTIVE: dict[str, tuple[Make, Change]] = {
    "a rate that was whole": (whole_numbers, setting(lr=0.3)),
    "a decay that was zero": (whole_numbers, setting(weight_decay=0.25)),
    "a switch": (whole_numbers, setting(lr=0.01, maximize=True)),
    "numbers in a tuple": (adam, setting(betas=(0.5, 0.8), weight_decay=0.1)),
    "a parameter that the model has no longer": (adam, take_bias_out),
}


@pytest.mark.parametrize("name", EFFECTIVE)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_a_change_has_the_effect_that_it_has_in_one_process(strategy: str, name: str) -> None:
    make, change = EFFECTIVE[name]
    want, _ = plainly(make, change)
    assert len(want) < 4 or any(
        not torch.equal(*pair) for pair in zip(want, plainly(make, setting())[0], strict=True)
    )
    for got, _ in in_threads(2, lambda world: trained(make, change, world, strategy), strategy=strategy):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, "parameter-server:async", "hogwild", "gossip"])
def test_after_the_session_every_worker_has_the_optimizers_state(strategy: str) -> None:
    _, alone = plainly(adam, setting())
    for _, optimizer in in_threads(
        2, lambda world: trained(adam, setting(), world, strategy), strategy=strategy
    ):
        (mine,), (theirs,) = (one.param_groups for one in (optimizer, alone))
        for param, other in zip(mine["params"], theirs["params"], strict=True):
            state, wanted = optimizer.state[param], alone.state[other]
            assert state.keys() == wanted.keys()
            if strategy in SYNCHRONOUS:
                torch.testing.assert_close(state["exp_avg"], wanted["exp_avg"], rtol=1e-9, atol=1e-12)
                assert float(state["step"]) == STEPS


def other_group(net: nn.Sequential, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def one_group_less(net: nn.Sequential, optimizer: Any) -> None:
    optimizer.param_groups.pop()


def one_more(net: nn.Sequential, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2).double())]})


def first_state(optimizer: Any) -> Any:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def assert_refused(make: Make, change: Change, expected: str, strategy: str) -> None:
    def work(world: World) -> None:
        net = make_net()
        optimizer = make(net)
        session = session_of(net, optimizer, loss, world=world, strategy=strategy)
        mine = [tuple(part[world.rank :: world.size] for part in batch) for batch in BATCHES]
        for batch in mine[:AT]:
            session.step(batch)

        def go_on() -> None:
            change(net, optimizer)
            for batch in mine[AT:]:
                session.step(batch)

        with pytest.raises(UsageError, match=re.escape(expected)):
            go_on()
        session.close()

    in_threads(2, work, strategy=strategy)


REFUSED: dict[str, tuple[Make, Change, str]] = {
    "another group": (two_groups, other_group, "has its parameters in other groups than when"),
    "a group less": (two_groups, one_group_less, "had 4 parameters when the session was made and has 2 now"),
    "a group more": (two_groups, one_more, "had 4 parameters when the session was made and has 5 now"),
    "state that is set": (
        adam,
        lambda net, optimizer: first_state(optimizer).update(step=torch.tensor(0.0)),
        "the state of the optimizer is with the session",
    ),
    "state that is taken away": (
        adam,
        lambda net, optimizer: first_state(optimizer).pop("exp_avg"),
        "the state of the optimizer is with the session",
    ),
    "all state": (adam, lambda net, optimizer: optimizer.state.clear(), "the state of the optimizer is with"),
    "a number of the state": (
        adam,
        lambda net, optimizer: first_state(optimizer)["step"].zero_(),
        "has written into 'step' of optimizer.state, which is a copy",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild", "local-sgd"])
def test_a_change_that_would_have_no_effect_is_refused(strategy: str, name: str) -> None:
    make, change, expected = REFUSED[name]
    assert_refused(make, change, expected, strategy)


@pytest.mark.parametrize("strategy", ["all-reduce", "all-reduce:topology=ring"])
def test_momentum_that_comes_later_is_refused(strategy: str) -> None:
    def make(net: nn.Module) -> Optimizer:
        return SGD(net.parameters(), lr=0.1)

    assert_refused(make, setting(momentum=0.9), "momentum of SGD was 0 when the session was made", strategy)


def test_groups_that_change_between_two_sessions() -> None:
    """The way out that a refusal names: close the session, change, and make a new one."""

    def frozen(net: nn.Sequential) -> Optimizer:
        net[0].weight.requires_grad_(False)
        return Adam([param for param in net.parameters() if param.requires_grad], lr=0.02)

    def thaw(net: nn.Sequential, optimizer: Any) -> None:
        net[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [net[0].weight], "lr": 0.05})

    def work(world: World) -> list[Tensor]:
        net = make_net()
        optimizer = frozen(net)
        session = session_of(net, optimizer, loss, world=world)
        for number, batch in enumerate(BATCHES):
            if number == AT:
                session.close()
                thaw(net, optimizer)
                session = session_of(net, optimizer, loss, world=world)
            session.step(tuple(part[world.rank :: world.size] for part in batch))
        session.close()
        return values(net)

    want, _ = plainly(frozen, thaw)
    for got in in_threads(2, work):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [*[(one, (0, 1)) for one in SYNCHRONOUS], *[(one, (1,)) for one in SYNCHRONOUS[:2]]],
)
def test_freezing_is_for_all_workers(strategy: str, ranks: tuple[int, ...]) -> None:
    """As in one process where all do it; refused where some train on."""

    def work(world: World) -> list[Tensor]:
        net = make_net()
        session = session_of(net, adam(net), loss, world=world, strategy=strategy)
        mine = [tuple(part[world.rank :: world.size] for part in batch) for batch in BATCHES]
        expected = (
            r"parameter '0.weight' is frozen on worker 1 \(requires_grad=False\) and trained on worker 0"
        )
        with nullcontext() if len(ranks) == 2 else pytest.raises(UsageError, match=expected):
            for number, batch in enumerate(mine):
                net[0].weight.requires_grad_(not (number == AT and world.rank in ranks))
                session.step(batch)
        session.close()
        return values(net)

    found = in_threads(2, work, strategy=strategy)
    if len(ranks) == 1:
        return
    net = make_net()
    optimizer = adam(net)
    for number, batch in enumerate(BATCHES):
        net[0].weight.requires_grad_(number != AT)
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    for got in found:
        for one, other in zip(got, values(net), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def shrink(net: nn.Module, optimizer: Any) -> None:
    for param in net.parameters():
        param.data.mul_(0.9)


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, "local-sgd"])
def test_writing_by_way_of_data_is_warned_of(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    in_threads(2, lambda world: trained(adam, setting(), world, strategy), strategy=strategy)
    assert "was written to" not in capfd.readouterr().err
    in_threads(2, lambda world: trained(adam, shrink, world, strategy), strategy=strategy)
    said = capfd.readouterr().err
    assert said.count("was written to between two steps, by every worker for itself") == (
        strategy != "local-sgd"
    )
    in_threads(1, lambda world: trained(adam, shrink, world, strategy), strategy=strategy)
    assert "was written to" not in capfd.readouterr().err


def forget_moments(net: nn.Module, optimizer: Any) -> None:
    for param in net.parameters():
        optimizer.state[param]["exp_avg"].zero_()


def test_writing_into_moments_that_workers_share_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    want, _ = plainly(adam, forget_moments)
    for workers in (2, 1):
        for got, _ in in_threads(workers, lambda world: trained(adam, forget_moments, world, "all-reduce")):
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        said = capfd.readouterr().err
        assert said.count("'exp_avg' of optimizer.state was written to between two steps") == workers - 1


@pytest.mark.parametrize("strategy", SYNCHRONOUS[:2])
def test_a_worker_without_samples_follows_what_is_frozen(strategy: str) -> None:
    """It has no gradient at all, before and after."""

    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, adam(net), loss, world=world, strategy=strategy)
        for number, batch in enumerate(BATCHES):
            net[0].weight.requires_grad_(number not in (1, AT))
            session.step(batch if world.rank == 0 else tuple(part[:0] for part in batch))
        session.close()

    in_threads(2, work, strategy=strategy)
