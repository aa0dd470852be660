"""What every placement must keep, run over everything registered: it computes what one process computes."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from manyhands import placement
from manyhands.cluster.world import World
from manyhands.errors import UsageError
from manyhands.placement import PLACEMENTS
from manyhands.placement.stages.schedule import SCHEDULES
from manyhands.sessions import Session, accuracy
from tests.crew import in_threads

Batch = tuple[Tensor, Tensor]

STEPS = 20
SIZE = 12  # samples of a step, over all workers

# The placement, and how many workers make so many replicas of it.
CASES = {
    **{f"pipeline:schedule={name}": (2, 1) for name in SCHEDULES},
    "pipeline:stages=3,microbatches=2": (3, 1),
    "pipeline:microbatches=5": (4, 2),
}
TEXTS = list(CASES)


def make_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(24, 17),
        nn.Tanh(),
        nn.Linear(17, 8),
        nn.Tanh(),
        nn.Linear(8, 4),
    )
    generator = torch.Generator().manual_seed(5)  # one of its own: threads share torch's
    net = net.double()
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)
    return net


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@functools.cache
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(17)
    return [
        (
            torch.randn(SIZE, 1, 4, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (SIZE,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def momentum(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def alone(
    make: Callable[[nn.Module], Optimizer] = momentum, clip: float | None = None, decay: float = 1.0
) -> nn.Module:
    """Plain PyTorch on the whole batch."""
    net = make_net()
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for batch in batches():
        optimizer.zero_grad()
        loss(net, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return net


def share(batch: Batch, feed: int, feeds: int) -> Batch:
    return batch[0][feed::feeds], batch[1][feed::feeds]


def make_session(world: World, text: str, **more: Any) -> Session:
    net = make_net()
    make = more.pop("make", momentum)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(world.rank)  # worker 0's become everyone's
    return Session(net, make(net), loss, world=world, placement=text, example=batches()[0], **more)


def train(session: Session, steps: Sequence[Batch]) -> list[float]:
    return [session.step(share(batch, session.feed, session.mesh.feeds)) for batch in steps]


def close_to(first: nn.Module, second: nn.Module, tolerance: float = 1e-9) -> None:
    for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def test_every_placement_is_tried() -> None:
    assert {type(placement.parse(text)) for text in TEXTS} >= set(PLACEMENTS.values()) - {PLACEMENTS["single"]}


@pytest.mark.parametrize("text", TEXTS)
def test_it_equals_one_process(text: str) -> None:
    workers, replicas = CASES[text]

    def work(world: World) -> tuple[nn.Module, list[float]]:
        session = make_session(world, text)
        assert session.mesh.replicas == replicas
        losses = train(session, batches())
        session.close()
        return session.model, losses

    results = in_threads(workers, work)
    for net, _ in results:
        close_to(net, alone())
    assert len({tuple(losses) for _, losses in results}) == session_feeds(text, workers)


def session_feeds(text: str, workers: int) -> int:
    return placement.parse(text).mesh(workers).feeds
