"""Steps whose gradient is not finite are left out on all workers alike, so many times."""

import functools

import pytest
import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import Diverged, UsageError
from tests.contracts.test_strategies import assert_same_bits
from tests.sessions import session_of
from tests.threads import in_threads

BAD = (2, 5)
STEPS = 8


def make_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            generator = torch.Generator().manual_seed(number)
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return net


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    if step in BAD and rank == 0:
        inputs[0, 0] = float("nan") if step == BAD[0] else float("inf")
    return inputs


def loss(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def work(world: World, half: str, skip: int = 2, **settings: object) -> list[Tensor]:
    net = make_net()
    session: Session = session_of(net, optimizer(net), loss, world=world, skip_nonfinite=skip, **settings)
    try:
        for step in range(STEPS):
            if half == "step":
                session.step(batch(step, world.rank))
            else:
                session.backward(batch(step, world.rank))
                session.update()
        assert session.steps == STEPS
    finally:
        session.close()
    return [value.detach().clone() for value in net.state_dict().values()]


@pytest.mark.parametrize("half", ["step", "halves"])
@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "local-sgd"])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_others_are_those_of_a_run_without_them(
    workers: int, strategy: str, half: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = in_threads(workers, functools.partial(work, half=half, strategy=strategy, logged=True))
    assert_same_bits(ours)
    assert all(torch.isfinite(value).all() for value in ours[0])
    assert capsys.readouterr().err.count("was left out, because its gradient is not finite") == len(BAD)
    if workers > 1:
        return  # batch norm's statistics are each worker's own
    net = make_net()
    plain = optimizer(net)
    for step in range(STEPS):
        if step not in BAD:
            plain.zero_grad()
            loss(net, batch(step, 0)).backward()
            plain.step()
    for got, want in zip(ours[0], net.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_one_more_ends_the_run() -> None:
    with pytest.raises(Diverged, match="step 6 has a gradient that is not finite, after 1 others"):
        in_threads(2, functools.partial(work, half="step", skip=1))
    with pytest.raises(Diverged):
        in_threads(2, functools.partial(work, half="step", skip=0))


def test_a_gradient_that_is_not_finite_ends_the_run_also_where_the_loss_is() -> None:
    """With the limit of the norm no update is made: without a word the run would stand still."""

    def at_the_edge(model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs).sub(model(inputs).detach()).square().mean().sqrt()

    def run(world: World) -> None:
        net = nn.Linear(4, 2).double()
        session = session_of(net, optimizer(net), at_the_edge, world=world, clip_norm=1.0)
        try:
            session.step(batch(0, world.rank))
        finally:
            session.close()

    with pytest.raises(Diverged, match="step 1 has a gradient that is not finite"):
        in_threads(2, run)


def test_where_servers_update_it_is_refused() -> None:
    with pytest.raises(UsageError, match="skip_nonfinite=2"):
        in_threads(2, functools.partial(work, half="step", strategy="parameter-server"))
