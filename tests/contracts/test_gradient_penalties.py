"""Gradients of gradients, as WGAN-GP takes them: those of one process, or refused before the first step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.contracts.test_placements import (
    batches,
    close_to,
    filled,
    make_net,
    momentum,
    share,
)
from tests.sessions import session_of
from tests.threads import in_threads

CASES = {"single": 2, "tensor": 2, "tensor:ways=3,whole=2": 3, "tensor:rows=4,columns=8": 4, "sharded": 2}


def penalised(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    scores = model(inputs)
    slopes = torch.autograd.grad(scores.square().sum(), inputs, create_graph=True)[0]
    return F.cross_entropy(scores, batch[1]) + (slopes.flatten(1).norm(dim=1) - 1).square().mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.into(inputs.flatten(1, 2))
        with torch.nn.attention.sdpa_kernel(
            torch.nn.attention.SDPBackend.MATH
        ):  # the other has no second derivative
            hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.out(torch.tanh(hidden).mean(1))


def attends() -> nn.Module:
    return filled(Attends().double(), 5, 0.3)


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("make", [make_net, attends])
def test_a_gradient_penalty_is_that_of_one_process(make: Any, text: str) -> None:
    if make is attends and ":" in text:
        pytest.skip("names layers of the other model")

    def work(world: World) -> nn.Module:
        net = make()
        session = session_of(net, momentum(net), penalised, world=world, placement=text)
        for batch in batches()[:5]:
            session.step(share(batch, session.engine.placed.feed, session.engine.placed.mesh.feeds))
        session.close()
        return net

    net = make()
    optimizer = momentum(net)
    for batch in batches()[:5]:
        optimizer.zero_grad()
        penalised(net, batch).backward()
        optimizer.step()
    for found in in_threads(CASES[text], work):
        close_to(found, net)


def test_what_could_not_be_exchanged_is_refused() -> None:
    """A weight that the loss uses outside of its layer, and of which a gradient's gradient is asked."""

    def twice(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].flatten(1).clone().requires_grad_()
        scores = F.linear(model(inputs), model.weight).square().sum()
        slopes = torch.autograd.grad(scores, [inputs, model.weight], create_graph=True)
        return sum((slope.square().mean() for slope in slopes), scores * 0)

    def work(world: World) -> None:
        net = filled(nn.Linear(16, 16).double(), 5, 0.3)
        session = session_of(net, momentum(net), twice, world=world, placement="tensor")
        with pytest.raises(UsageError, match="gradients of gradients"):
            session.step(batches()[0])

    in_threads(2, work)
