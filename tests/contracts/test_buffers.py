"""Buffers and parameters in unusual memory: views, expanded, sparse, channels last; trained as one process does."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.contracts.test_strategies import DIFFERENT, optimizer_for
from tests.sessions import session_of
from tests.threads import in_threads

Batch = tuple[Tensor, Tensor]

BATCHES: list[Batch] = [
    (torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(6) % 3)
    for seed in range(4)
]


class Odd(nn.Module):
    """What people's models have besides plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        draw = functools.partial(torch.randn, generator=generator)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.into = nn.Linear(8, 12)
        self.out = nn.Linear(12, 3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.3 * draw(param.shape))
        self.conv.to(memory_format=torch.channels_last)
        self.out.weight = nn.Parameter((0.3 * draw(12, 3)).t())  # a view of another order
        self.scale = nn.Parameter(draw(12, 1).t()[:, :1].expand(1, 1).squeeze(0))
        # PyTorch's own tutorial on transformers makes its positions like this.
        self.register_buffer("positions", draw(10, 12).unsqueeze(0).transpose(0, 1))
        self.register_buffer("shift", draw(1, 12).expand(6, 12))
        self.register_buffer("once", draw(1, 8, 1, 1).to(memory_format=torch.channels_last))
        self.register_buffer("mixing", torch.eye(12).add(draw(12, 12) > 1).to_sparse())
        self.register_buffer("mixing_rows", torch.eye(12).mul(0.5).to_sparse_csr())
        self.register_buffer("every_other", draw(24)[::2])
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(inputs) + self.once).mean((2, 3))
        hidden = torch.tanh(self.into(hidden)) + 0.1 * self.positions[0] + 0.1 * self.shift[: len(inputs)]
        hidden = torch.sparse.mm(self.mixing, hidden.t()) + torch.sparse.mm(self.mixing_rows, hidden.t())
        return self.scale * self.out(hidden.t() * self.every_other)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def trained(world: World, directory: Path | None = None, **settings: Any) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and the state after two more."""
    net = Odd()
    session = session_of(
        net, optimizer_for(settings["strategy"], momentum)(net), loss, world=world, **settings
    )
    for number, batch in enumerate(BATCHES):
        session.step(batch)
        if directory and number == 1:
            session.save(directory, wait=True)
    session.close()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def alone() -> dict[str, Tensor]:
    net = Odd()
    optimizer = momentum(net)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    return dict(net.state_dict())


def assert_equal(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, want in plain.items():
        got = ours[name]
        assert (got.layout, got.shape) == (want.layout, want.shape), name
        torch.testing.assert_close(
            got.to_dense(), want.to_dense(), msg=lambda text, name=name: f"{name}: {text}"
        )


SYNCHRONOUS = ["single", "all-reduce", "all-reduce:topology=ring", "parameter-server:sync"]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_they_train_as_in_one_process(strategy: str, tmp_path: Path) -> None:
    workers = 1 if strategy == "single" else 2
    ours = in_threads(workers, lambda world: trained(world, tmp_path, strategy=strategy), strategy=strategy)
    for one in ours:
        assert_equal(one, alone())


@pytest.mark.parametrize("strategy", [text for text in DIFFERENT if text not in SYNCHRONOUS])
def test_they_train_under_every_strategy(strategy: str) -> None:
    ours = in_threads(4, lambda world: trained(world, strategy=strategy), strategy=strategy)
    fixed = {name: value for name, value in Odd().state_dict().items() if "." not in name and name != "scale"}
    for one in ours:
        assert_equal({name: one[name] for name in fixed}, fixed)


@pytest.mark.processes
@pytest.mark.parametrize("text", ["sharded", "tensor:ways=2"])
def test_they_train_under_placements(text: str, tmp_path: Path) -> None:
    work = functools.partial(trained, directory=tmp_path, strategy="all-reduce", placement=text)
    for one in in_threads(2, work):
        assert_equal(one, alone())


@pytest.mark.processes
@pytest.mark.parametrize("text", ["single", "sharded"])
def test_a_checkpoint_has_them(text: str, tmp_path: Path) -> None:
    def resumed(world: World) -> dict[str, Tensor]:
        net = Odd()
        with torch.no_grad():
            net.shift[0] += 1  # through the one value that all rows see
            net.mixing.values().mul_(3)
        session = session_of(net, momentum(net), loss, world=world, placement=text)
        session.resume(tmp_path)
        for batch in BATCHES[2:]:
            session.step(batch)
        session.close()
        return dict(net.state_dict())

    in_threads(2, lambda world: trained(world, tmp_path, strategy="all-reduce", placement=text))
    for one in in_threads(2, resumed):
        assert_equal(one, alone())


def test_buffers_of_other_shapes_are_refused() -> None:
    def work(world: World) -> None:
        net = nn.Linear(3, 3)
        net.register_buffer("memory", torch.zeros(2 + world.rank))
        with pytest.raises(UsageError, match="buffers have other shapes on worker 1 than on worker 0"):
            session_of(net, momentum(net), loss, world=world)

    in_threads(2, work)
