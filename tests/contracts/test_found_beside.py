"""What a script has beside a session, or looks for after a step, that is not there with several workers: parameters of
a criterion, the tensors of one batch, gradients that were used, statistics of all samples."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.sessions import session_of
from tests.threads import in_threads

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True)
BATCH = (INPUTS, TARGETS)


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    return net


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for module in modules for param in module.parameters()], lr=0.1)


def square(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


# Parameters that are not the model's


@pytest.mark.parametrize(
    "settings", [{}, {"strategy": "local-sgd"}, {"placement": "pipeline:stages=2"}], ids=str
)
def test_a_criterion_that_a_script_trains_itself_is_refused(settings: dict[str, Any]) -> None:
    """Each worker would train its own; before its first update."""

    def work(world: World) -> bool:
        net, criterion = make_net(), nn.Linear(1, 1)
        before = copy.deepcopy(criterion.state_dict())
        session = session_of(
            net,
            sgd(net),
            lambda model, batch: F.mse_loss(criterion(model(batch[0])), batch[1]),
            world=world,
            **settings,
        )
        own = sgd(criterion)
        session.step(BATCH)
        refused = False
        try:
            own.step()
        except UsageError as error:
            refused = "SGD steps a parameter of the shape (1, 1)" in str(error)
        assert all(
            torch.equal(*pair) for pair in zip(before.values(), criterion.state_dict().values(), strict=True)
        )
        session.close()
        own.step()  # it is the script's own again
        return refused

    assert any(in_threads(2, work))


def test_one_worker_may_train_a_criterion_itself() -> None:
    def work(world: World) -> None:
        net, criterion = make_net(), nn.Linear(1, 1)
        own = sgd(criterion)
        session = session_of(
            net, sgd(net), lambda model, batch: F.mse_loss(criterion(model(batch[0])), batch[1]), world=world
        )
        session.step(BATCH)
        own.step()
        session.close()

    in_threads(1, work)


def test_other_optimizers_and_other_sessions_are_left_alone() -> None:
    """A teacher that is not frozen, a model that has nothing to do with the loss, and one with its own session."""

    def work(world: World) -> None:
        net, teacher, unrelated, judge = make_net(), make_net(), make_net(), nn.Linear(1, 1)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            found = model(batch[0])
            return F.mse_loss(found, teacher(batch[0])) + judge(found).mean()

        session = session_of(net, sgd(net), loss, world=world)
        other = session_of(
            judge, sgd(judge), lambda model, batch: model(batch[1]).square().mean(), world=world
        )
        beside = sgd(unrelated)
        for _ in range(2):
            session.step(BATCH)
            other.step(BATCH)
            square(unrelated, BATCH).backward()
            beside.step()
        session.close()
        other.close()

    in_threads(2, work)


# One batch, taken apart


@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_batch_that_is_taken_apart_is_refused(call: str) -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, sgd(net), square, world=world)
        loop = iter(session.batches(TensorDataset(INPUTS, TARGETS), batch_size=4))
        batch = next(loop)
        with pytest.raises(UsageError, match="was given the 2 tensors of one batch"):
            getattr(session, call)(*batch)
        session.close()

    in_threads(1, work)


def test_parts_of_a_batch_are_batches() -> None:
    """Several of them make one update, and so do tensors of different batches."""

    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, sgd(net), square, world=world)
        for inputs, targets in session.batches(TensorDataset(INPUTS, TARGETS), batch_size=4):
            session.step(*zip(inputs.split(1), targets.split(1), strict=True))
        session.close()
        net = make_net()
        session = session_of(net, sgd(net), lambda model, batch: model(batch).square().mean(), world=world)
        ours, theirs = (session.batches(list(INPUTS), batch_size=4) for _ in range(2))
        for pair in zip(ours, theirs, strict=True):
            session.step(*pair)
        session.close()

    in_threads(2, work)


# Gradients after a step


def norms(net: nn.Module) -> float:
    return sum(float(param.grad.norm()) for param in net.parameters() if param.grad is not None)


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:sync", "local-sgd"])
def test_reading_gradients_after_a_step_is_warned_of_once(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, sgd(net), square, world=world, strategy=strategy)
        for _ in range(3):
            session.step(BATCH)
            assert norms(net) == 0
        session.close()
        assert all(type(param) is nn.Parameter for param in net.parameters())

    in_threads(2, work, strategy=strategy)
    assert capsys.readouterr().err.count("param.grad was read after session.step") == 1


def forget(net: nn.Module) -> None:
    net.zero_grad()
    sgd(net).zero_grad(set_to_none=False)
    for param in net.parameters():
        param.grad = None


@pytest.mark.parametrize(
    "read", [forget, copy.deepcopy, lambda net: net.state_dict(), lambda net: net(INPUTS)]
)
def test_nothing_else_is_taken_for_it(
    read: Callable[[nn.Module], object], capsys: pytest.CaptureFixture[str]
) -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, sgd(net), square, world=world)
        for _ in range(3):
            session.step(BATCH)
            read(net)
        session.backward(BATCH)
        assert norms(net) > 0
        session.update()
        session.close()
        assert norms(net) == 0
        assert all(type(param) is nn.Parameter for param in net.parameters())

    in_threads(2, work)
    assert "param.grad" not in capsys.readouterr().err


# Statistics of the model's own


class Observed(nn.Module):
    """Keeps the largest value that it has seen, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))
        self.sees = True

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.sees:
            self.largest = torch.maximum(self.largest, inputs.max())
        return self.norm(self.net(inputs))


@pytest.mark.parametrize("sees", [True, False])
def test_buffers_that_go_by_each_workers_samples_are_spoken_of(
    sees: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """But not those that are the same on all workers, and not batch norm's."""

    def work(world: World) -> None:
        model = Observed()
        model.sees = sees
        session = session_of(model, sgd(model), square, world=world)
        for _ in range(2):
            session.step((INPUTS[world.rank :: 2], TARGETS[world.rank :: 2]))
            session.model_state()
        session.close()

    in_threads(2, work)
    said = capsys.readouterr().err
    assert said.count("the buffer 'largest' went by the samples of each worker alone") == sees
    assert "norm" not in said
    assert "calls" not in said


class Counting(nn.Module):
    """Counts what it has seen in training, in buffers of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.norm, self.kind = make_net(), nn.BatchNorm1d(1), kind
        self.register_buffer("seen", torch.zeros((), dtype=torch.float32 if kind == "float" else torch.int64))
        self.register_buffer("of_class", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.kind in ("whole", "float"):
                self.seen += len(inputs)
            elif self.kind == "by class":
                self.of_class += torch.bincount((inputs[:, 0] > 0).long(), minlength=2)
        return self.norm(self.net(inputs))


@pytest.mark.parametrize("settings", [{}, {"strategy": "local-sgd"}, {"placement": "sharded"}], ids=str)
@pytest.mark.parametrize(
    ("kind", "name"), [("whole", "seen"), ("float", "seen"), ("by class", "of_class"), ("passes", "")]
)
def test_a_buffer_that_counts_samples_is_spoken_of(
    kind: str, name: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each worker counts its own, and no pause shows it: they are equal. Passes are counted as in one process."""

    def work(world: World) -> None:
        model = Counting(kind)
        session = session_of(model, sgd(model), square, world=world, **settings)
        for _ in range(3):
            session.step((INPUTS[world.rank :: 2], TARGETS[world.rank :: 2]))
        session.close()

    in_threads(2, work)
    said = capsys.readouterr().err
    assert said.count("grew with the 8 samples of one worker") == bool(name)
    assert f"the buffer {name!r} grew" in said or not name


def test_a_count_is_seen_where_the_script_computes_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> None:
        model = Counting("whole")
        session = session_of(model, sgd(model), square, world=world)
        for _ in range(2):
            batch = (INPUTS[world.rank :: 2], TARGETS[world.rank :: 2])
            session.backward(square(model, batch), samples=8)
            session.update()
        session.close()

    in_threads(2, work)
    assert "the buffer 'seen' grew" in capsys.readouterr().err


# Another optimizer for a part of the model


@pytest.mark.parametrize("settings", [{}, {"strategy": "local-sgd"}, {"placement": "sharded"}], ids=str)
def test_an_optimizer_of_ones_own_for_parts_of_the_model_is_refused(settings: dict[str, Any]) -> None:
    def work(world: World) -> None:
        net = make_net()
        own = torch.optim.SGD(net[2].parameters(), lr=0.1)
        session = session_of(net, sgd(net[0]), square, world=world, **settings)
        session.step((INPUTS[world.rank :: 2], TARGETS[world.rank :: 2]))
        with pytest.raises(UsageError, match=r"another optimizer \(SGD\) steps 2\."):
            own.step()
        session.close()

    in_threads(2, work)


def test_a_pipeline_refuses_what_its_optimizer_leaves_out() -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, sgd(net[0]), square, world=world, placement="pipeline:stages=2")
        session.step(BATCH)

    with pytest.raises(UsageError, match=r"has not 2.weight and 1 others; give them to it"):
        in_threads(2, work)
