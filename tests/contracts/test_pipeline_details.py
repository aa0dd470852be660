"""What is easily lost in a pipeline: unusual buffers, hooks of parameters, types, and what microbatches change."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from manyhands.placement.pipeline.timetable import SCHEDULES
from tests.contracts.ordinary_models import Case, pictures
from tests.contracts.test_pipelines import Four, alone, batches, close_to, first, make, momentum, session_for
from tests.threads import in_threads


class UnusualBuffers(Four):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.linspace(0, 1, 8).expand(4, 8))
        self.register_buffer("sparse", torch.eye(8).to_sparse())
        self.register_buffer("rows", torch.eye(8).to_sparse_csr())

    def middle(self, hidden: Tensor) -> Tensor:
        turned = torch.sparse.mm(self.sparse, hidden.t()).t() + self.expanded[0]
        return self.three(torch.tanh(self.two(turned)))


class Hooks(Four):
    """One of a parameter, and one that comes after the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.two.weight.register_hook(lambda gradient: gradient * 0.5)
        self.four.bias.register_hook(torch.neg)


class OneRow(Four):
    """A linear layer of a vector."""

    def middle(self, hidden: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(hidden[0]))) + hidden


class KeepsMean(nn.Linear):
    """A buffer that is another tensor after each pass."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.training:
            self.mean = 0.9 * self.mean + outputs.detach().mean(0)
        return outputs


class Replaces(Four):
    def __init__(self) -> None:
        super().__init__()
        self.two = KeepsMean()


DETAILS = {"buffers": UnusualBuffers, "hooks": Hooks, "one row": OneRow}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DETAILS)
def test_they_equal_one_process(name: str, schedule: str) -> None:
    case = Case(DETAILS[name], first, pictures, "microbatches=1")

    def work(world: World) -> nn.Module:
        session = session_for(world, case, schedule)
        for batch in batches(case):
            session.step(batch)
        session.close()
        return session.model

    for found in in_threads(2, work):
        compare(found, alone(case))


def compare(found: nn.Module, expected: nn.Module) -> None:
    for net in (found, expected):
        for name in [name for name, each in net.named_buffers() if each.layout != torch.strided]:
            net.register_buffer(name, getattr(net, name).to_dense())
    close_to(found, expected)


class Single(Four):
    def double(self) -> "Single":
        return self.float()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lower_precision(schedule: str) -> None:
    """Gradients of another type than the parameters."""

    def mixed(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(batch[0].float())
        return F.cross_entropy(scores.float(), batch[1])

    case = Case(Single, mixed, pictures, "microbatches=1")

    def work(world: World) -> nn.Module:
        session = session_for(world, case, schedule)
        for batch in batches(case):
            session.step(batch)
        session.close()
        return session.model

    for found in in_threads(2, work):
        for one, other in zip(found.parameters(), alone(case).parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "placement", ["pipeline:microbatches=1", "tensor", "hybrid:microbatches=1", "sharded"]
)
def test_a_buffer_that_is_replaced_stays_with_its_model(placement: str) -> None:
    """In stages, also the runs before the first step leave it as it was."""
    case = Case(Replaces, first, pictures)

    def work(world: World) -> dict[str, Tensor]:
        session = session_for(world, case, placement=placement)
        for batch in batches(case)[:2]:
            session.step(batch)
        state = session.model_state()
        session.step(batches(case)[2])
        session.close()
        close_to(session.model, after(case, 3))
        return state

    for state in in_threads(4 if "hybrid" in placement else 2, work):
        found = make(case)
        found.load_state_dict(state)
        close_to(found, after(case, 2))


def after(case: Case, steps: int) -> nn.Module:
    net = make(case)
    optimizer = momentum(net)
    for batch in batches(case)[:steps]:
        optimizer.zero_grad()
        case.loss(net, batch).backward()
        optimizer.step()
    return net


def contrasts(model: nn.Module, batch: Any) -> Tensor:
    places = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(places @ places.t(), torch.arange(len(places)))


def leaves_out(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].where(batch[1] > 0, -100))


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@pytest.mark.parametrize("loss", [contrasts, leaves_out, summed])
def test_a_loss_that_is_no_mean_over_samples_is_refused_in_microbatches(loss: Any) -> None:
    case = Case(Four, loss, pictures, "microbatches=3")

    def work(world: World) -> None:
        session = session_for(world, case)
        with pytest.raises(UsageError, match=r"no mean over samples.*use microbatches=1"):
            session.step(batches(case)[0])

    in_threads(2, work)


class Normed(Four):
    def __init__(self) -> None:
        super().__init__()
        self.two = spectral_norm(self.two)


class Batched(Four):
    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Sequential(self.two, nn.BatchNorm1d(8))


@pytest.mark.parametrize(("model", "says"), [(Normed, True), (Batched, True), (Four, False)])
def test_modules_that_see_each_microbatch_by_itself_are_said(
    model: type[nn.Module], says: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case(model, first, pictures, "microbatches=3")

    def work(world: World) -> None:
        session = session_for(world, case)
        session.step(batches(case)[0])
        session.close()

    in_threads(2, work)
    assert ("see each of the 3 microbatches by itself" in capfd.readouterr().err) == says


class OfItsBatch(Four):
    """As the published vision transformer: one token for each place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(7, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.tokens.sum(1, keepdim=True)


def test_a_model_that_takes_no_microbatch_is_refused() -> None:
    case = Case(OfItsBatch, first, pictures, "microbatches=3")

    def work(world: World) -> None:
        session = session_for(world, case)
        with pytest.raises(
            UsageError,
            match=r"takes the first batch of 7 samples, and not a microbatch of 2 \(RuntimeError: .*microbatches=1",
        ):
            session.step(batches(case)[0])

    in_threads(2, work)
