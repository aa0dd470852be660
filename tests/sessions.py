"""Sessions for tests, in a world that the test has made."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session, make
from manyhands.engine.settings import Settings, Training


def session_of(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Any,
    *,
    world: World,
    scheduler: Any = None,
    member: Member | None = None,
    **settings: Any,
) -> Session:
    """A session, with `Settings` by their names."""
    training = Training(model=model, optimizer=optimizer, loss=loss, scheduler=scheduler)
    return make(training, Settings(**settings), world, member)
