"""Pipelines of ordinary models: every schedule computes what one process computes, or the model is refused."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from manyhands.placement.pipeline.timetable import SCHEDULES
from tests.contracts.ordinary_models import MODELS, Case, pictures
from tests.sessions import session_of
from tests.threads import in_threads

SIZES = (7, 7, 4, 7, 5)  # samples of each step: some microbatches are smaller than others
TOLERANCE = 1e-9


def batches(case: Case) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [case.batch(size, generator) for size in SIZES]


def make(case: Case) -> nn.Module:
    """The same values in every thread: a generator of its own, since threads share torch's."""
    net = case.model().double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)
    return net


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Taken(Dataset[Any]):
    """The samples of the first batches, one by one."""

    def __init__(self, given: list[Any]) -> None:
        self._batches = given
        self._places = [(batch, row) for batch, size in enumerate(SIZES[:2]) for row in range(size)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self._one(*self._places[number]) for number in numbers]

    def _one(self, batch: int, row: int) -> Any:
        given = self._batches[batch]
        if isinstance(given, dict):
            return {name: v[row] if isinstance(v, Tensor) else v for name, v in given.items()}
        return tuple(each[row] for each in given)


def alone(case: Case, loss: Any = None) -> nn.Module:
    net = make(case)
    optimizer = momentum(net)
    for batch in batches(case):
        optimizer.zero_grad()
        (loss or case.loss)(net, batch).backward()
        optimizer.step()
    return net


def session_for(world: World, case: Case, schedule: str = "1f1b", **more: Any) -> Session:
    net = make(case)
    text = f"pipeline:schedule={schedule},{case.text}"
    loss = more.pop("loss", case.loss)
    return session_of(net, momentum(net), loss, world=world, placement=more.pop("placement", text), **more)


def close_to(first: nn.Module, second: nn.Module) -> None:
    for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_one_process(name: str, schedule: str) -> None:
    """The first batch of the run shows how the model is cut."""
    case = MODELS[name]
    data = Taken(batches(case))

    def work(world: World) -> tuple[nn.Module, float]:
        session = session_for(world, case, schedule)
        for batch in batches(case):
            session.step(batch)
        value = session.evaluate(data, batch_size=len(data))["loss"]
        session.close()
        return session.model, value

    net = alone(case)
    whole = default_collate(data.__getitems__(list(range(len(data)))))
    expected = _evaluated(net, case, whole)
    for found, value in in_threads(2, work):
        close_to(found, net)
        assert value == pytest.approx(expected, rel=1e-9)


def _evaluated(net: nn.Module, case: Case, batch: Any) -> float:
    net.eval()
    with torch.no_grad():
        value = float(case.loss(net, batch))
    net.train()
    return value


@pytest.mark.processes
@pytest.mark.parametrize("name", ["residual", "generator"])
def test_checkpoints(name: str, tmp_path: Path) -> None:
    """A script that resumes does so before its first batch."""
    case = MODELS[name]
    steps = batches(case)

    def first(world: World) -> None:
        session = session_for(world, case)
        for batch in steps[:2]:
            session.step(batch)
        session.save(tmp_path)
        session.close()

    def rest(world: World) -> tuple[nn.Module, int]:
        session = session_for(world, case, "interleaved")
        session.resume(tmp_path)
        resumed = session.steps
        for batch in steps[resumed:]:
            session.step(batch)
        session.close()
        return session.model, resumed

    in_threads(2, first)
    for net, resumed in in_threads(2, rest):
        assert resumed == 2
        close_to(net, alone(case))


# What is right although it is unusual, and what is refused


class Four(nn.Module):
    """Four layers; cases below say what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.four = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.one(inputs.flatten(1))))
        return self.four(torch.tanh(hidden))

    def middle(self, hidden: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(hidden)))


class Looking(nn.Module):
    """A module whose path depends on numbers: it is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.left(inputs)
        return self.right(torch.tanh(hidden)) if bool((hidden > 0.1).any()) else hidden


class LooksInside(Four):
    def __init__(self) -> None:
        super().__init__()
        self.two, self.three = Looking(), Looking()


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class TurnsGradients(Four):
    def middle(self, hidden: Tensor) -> Tensor:
        return self.two(Turned.apply(hidden)) + self.three(hidden)  # type: ignore[no-untyped-call]


class WritesInPlace(Four):
    def middle(self, hidden: Tensor) -> Tensor:
        kept = torch.zeros(2, *hidden.shape, dtype=hidden.dtype)
        kept[0] = self.two(hidden.clone().mul_(2))
        kept[1] = self.three(kept[0].clone())
        return kept.sum(0)


class Recomputes(Four):
    def middle(self, hidden: Tensor) -> Tensor:
        second = torch.utils.checkpoint.checkpoint(self.two, hidden, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(self.three, torch.tanh(second), use_reentrant=False)


class Anneals(Four):
    """A number that changes from step to step."""

    steps = 0

    def middle(self, hidden: Tensor) -> Tensor:
        self.steps += self.training
        return self.three(torch.tanh(self.two(hidden))) * (1 + 0.1 * self.steps)


def in_pieces(model: nn.Module, batch: Any) -> Tensor:
    hidden = torch.tanh(model.one(batch[0].flatten(1)))
    return F.cross_entropy(model.four(torch.tanh(model.middle(hidden))), batch[1])


def penalised(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * sum(
        p.square().sum() for p in model.parameters()
    )


def in_a_dictionary(model: nn.Module, batch: Any) -> Any:
    scores = model(batch[0])
    return {"loss": F.cross_entropy(scores, batch[1]), "right": (scores.argmax(1) == batch[1]).sum().item()}


def first(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def writes_into_its_batch(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].mul_(0.5)), batch[1])


UNUSUAL = {
    "looks inside of modules": (LooksInside, first),
    "gradients of its own": (TurnsGradients, first),
    "writes in place": (WritesInPlace, first),
    "recomputes": (Recomputes, first),
    "anneals": (Anneals, first),
    "calls parts of the model": (Four, in_pieces),
    "a penalty on parameters": (Four, penalised),
    "more than the loss": (Four, in_a_dictionary),
    "writes into its batch": (Four, writes_into_its_batch),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_right(name: str) -> None:
    model, loss = UNUSUAL[name]
    case = Case(model, loss, pictures, "microbatches=1")

    def work(world: World) -> nn.Module:
        session = session_for(world, case, "interleaved" if "batch" in name else "1f1b")
        for batch in batches(case):
            session.step(batch)
        session.close()
        return session.model

    def plain(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        return value["loss"] if isinstance(value, dict) else value

    for found in in_threads(2, work):
        close_to(found, alone(case, plain))


class CallsAgain(Four):
    def middle(self, hidden: Tensor) -> Tensor:
        return self.two(torch.tanh(self.three(torch.tanh(self.two(hidden)))))


class DrawsPython(Four):
    def middle(self, hidden: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(hidden * random.random())))


class Rolls(Four):
    def middle(self, hidden: Tensor) -> Tensor:
        return self.three(hidden) if random.random() < 0.5 else self.three(self.two(hidden))


class LooksBetween(Four):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(inputs.flatten(1))
        return self.four(self.middle(hidden * 2 if hidden.mean() > 0 else hidden))


def twice(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), model(batch[0] + 0.1).detach())


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    scores = model(inputs)
    slopes = torch.autograd.grad(scores.sum(), inputs, create_graph=True)[0]
    return F.cross_entropy(scores, batch[1]) + slopes.square().mean()


def without_the_model(model: nn.Module, batch: Any) -> Tensor:
    return batch[0].mean().requires_grad_()


REFUSED = {
    "a layer again": (CallsAgain, first, "split=three", "two is called before and after it"),
    "python's numbers": (DrawsPython, first, "split=two", "random numbers that are not torch's"),
    "chance": (Rolls, first, "stages=2", "the same on the same shapes|no 1 places"),
    "numbers between stages": (LooksBetween, first, "split=one", "asks for numbers"),
    "the model twice": (Four, twice, "stages=2", "is called before and after it"),
    "gradients of gradients": (Four, gradient_penalty, "stages=2", "in stages the model does not compute"),
    "no model": (Four, without_the_model, "stages=2", "does not call the model"),
    "no such layer": (Four, first, "split=five", "no such layer; it calls one, two, three, four"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_before_the_first_step(name: str) -> None:
    model, loss, text, words = REFUSED[name]
    case = Case(model, loss, pictures)

    def work(world: World) -> None:
        session = session_for(world, case, placement=f"pipeline:microbatches=1,{text}")
        before = [param.clone() for param in session.model.parameters()]
        with pytest.raises(UsageError, match=words):
            session.step(batches(case)[0])
        assert all(map(torch.equal, before, session.model.parameters()))

    in_threads(2, work)


# Before the first batch


def test_a_session_may_end_before_its_first_batch() -> None:
    def work(world: World) -> int:
        session = session_for(world, MODELS["digits"])
        assert session.gather(world.rank) == [0, 1]
        with pytest.raises(UsageError, match="make a step first"):
            session.save(Path("nowhere"))
        session.close()
        return session.steps

    assert in_threads(2, work) == [0, 0]


class Passes(Four):
    def forward(self, inputs: Tensor) -> Tensor:
        return 0 * super().forward(inputs) + inputs.flatten(1)[:, :5]


def test_noise_of_the_loss_is_drawn_once() -> None:
    """The first stage draws what goes into the model, and the last one compares with the same."""
    case = Case(Passes, first, pictures, "microbatches=2")

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.randn_like(batch[0])
        return (model(batch[0] + noise) - (batch[0] + noise).flatten(1)[:, :5]).square().mean()

    def work(world: World) -> None:
        session = session_for(world, case, loss=noisy)
        for batch in batches(case):
            assert float(session.step(batch)) == 0.0
        assert session.evaluate(Taken(batches(case)), batch_size=2)["loss"] == 0.0
        session.close()

    in_threads(2, work)
