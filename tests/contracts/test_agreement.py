"""What all workers have alike when they have agreed, under everything registered: parameters, steps, schedules."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.errors import TornUpdate
from manyhands.strategies import local_sgd
from tests.faults import registered
from tests.sessions import session_of
from tests.threads import in_threads

LENGTH, BATCH, EPOCHS = 50, 4, 2
STRATEGIES = [text for text in registered.every_strategy() if registered.workers(text, replicas=3)]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


@dataclass(frozen=True)
class Ended:
    """How one worker ended."""

    steps: int
    pace: int
    scheduled: int
    rate: float
    params: Tensor


def train(world: World, strategy: str) -> Ended:
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(LENGTH, 3)
    only = strategies.tuning(strategies.parse(strategy)).only_optimizer
    optimizer: Any = (
        torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=1)
        if only
        else torch.optim.SGD(net.parameters(), 0.01)
    )
    schedule = CosineAnnealingLR(optimizer, 100)
    session = session_of(net, optimizer, loss, world=world, strategy=strategy, scheduler=schedule)
    for _ in range(EPOCHS):
        for batch in session.batches(list(data), batch_size=BATCH):
            session.step(batch)
    session.evaluate(list(data))
    session.close()
    params = nn.utils.parameters_to_vector(net.parameters()).detach()
    rate = float(optimizer.param_groups[0]["lr"])
    return Ended(session.steps, session.pace, schedule.last_epoch, rate, params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_end_alike(strategy: str) -> None:
    workers = registered.workers(strategy, replicas=3)
    assert workers
    servers = registered.servers(strategy)
    ended = in_threads(workers, lambda world: train(world, strategy), strategy=strategy, servers=servers)
    first = ended[0]
    steps = EPOCHS * -(-LENGTH // (BATCH * workers))
    assert [(one.steps, one.pace, one.scheduled) for one in ended] == [(steps, steps, steps)] * workers
    assert {one.rate for one in ended} == {first.rate}
    assert all(torch.equal(one.params, first.params) for one in ended)


@pytest.mark.parametrize(("own", "is_said"), [("step", True), ("epoch", False), ("none", False)])
def test_a_script_with_a_schedule_of_its_own_hears_after_a_death(
    own: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates that change from step to step go by the steps of one worker; once in an epoch is right."""

    def work(world: World) -> None:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        schedule = CosineAnnealingLR(optimizer, 100)
        session = session_of(net, optimizer, loss, world=world)
        session.engine.progress.has_regrouped = True
        for _ in range(EPOCHS):
            for batch in session.batches(list(torch.randn(LENGTH, 3)), batch_size=BATCH):
                session.step(batch)
                if own == "step":
                    schedule.step()
            if own == "epoch":
                schedule.step()
        session.close()

    in_threads(1, work)
    said = capsys.readouterr().err
    assert said.count("give the scheduler to mh.session(scheduler=…)") == is_said


def apart(monkeypatch: pytest.MonkeyPatch, difference: float) -> list[Ended]:
    """Worker 1 ends each average with something else than the others."""
    real = local_sgd.LocalSGD.meet

    def meet(strategy: Any, replica: Any, comm: Any) -> None:
        real(strategy, replica, comm)
        if comm.rank == 1:
            replica.params.add_(difference)

    monkeypatch.setattr(local_sgd.LocalSGD, "meet", meet)
    return in_threads(3, lambda world: train(world, "local-sgd"))


def test_what_differs_by_rounding_becomes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts with other processors."""
    ended = apart(monkeypatch, 1e-7)
    assert all(torch.equal(one.params, ended[0].params) for one in ended)


def test_a_worker_with_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        TornUpdate, match=r"worker 1 has other parameters than worker 0 after all have agreed: their norms"
    ):
        apart(monkeypatch, 0.02)
