"""Sessions for tests, in a world that the test has made."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.cluster.world import World
from manyhands.sessions import Session


def session_of(
    model: nn.Module, optimizer: Optimizer, loss: Any, *, world: World, **settings: Any
) -> Session:
    return Session(model, optimizer, loss, world=world, **settings)
