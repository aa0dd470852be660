"""Parts of a model that a placement spreads: called by a script, and trained by a second session."""

import pytest
import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.contracts.test_placements import (
    batches,
    close_to,
    filled,
    loss,
    make_net,
    make_session,
    momentum,
    train,
)
from tests.sessions import session_of
from tests.threads import in_threads

INPUTS = batches()[3][0]


class InTwo(nn.Module):
    """Linear layers of which the first hands slices on to the second, inside of a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)), nn.Linear(16, 4)]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](inputs.flatten(1)))


@pytest.mark.parametrize("text", ["tensor", "sharded"])
def test_a_part_of_the_model_may_be_called(text: str) -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        net = filled(InTwo().double(), 5, 0.3)
        session = session_of(net, momentum(net), loss, world=world, placement=text)
        found = net.parts[0](INPUTS.flatten(1)), net(INPUTS)
        train(session, batches()[:1])
        session.close()
        return found

    net = filled(InTwo().double(), 5, 0.3)
    for part, whole in in_threads(2, work):
        assert torch.allclose(part, net.parts[0](INPUTS.flatten(1)), rtol=1e-9)
        assert torch.allclose(whole, net(INPUTS), rtol=1e-9)


@pytest.mark.parametrize("text", ["tensor", "sharded", "pipeline:microbatches=5"])
def test_a_model_in_parts_has_one_session(text: str) -> None:
    def work(world: World) -> None:
        session = make_session(world, text)
        train(session, batches()[:1])
        head = session.model[-1]
        for model in (session.model, head):
            with pytest.raises(UsageError, match="session 1 has laid this model over workers"):
                session_of(model, momentum(model), loss, world=world, placement=text)
        session.close()
        again = session_of(session.model, momentum(session.model), loss, world=world, placement=text)
        train(again, batches()[1:2])
        again.close()
        net = make_net()
        for batch in batches()[:2]:
            optimizer = momentum(net)
            loss(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        close_to(session.model, net)

    in_threads(2, work)
