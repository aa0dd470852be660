"""Gradients as factors are the gradients: large linear layers train as in one process, whatever the model does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from manyhands.cluster.worker.world import World
from tests.sessions import session_of
from tests.threads import in_threads

STEPS, SAMPLES, FEATURES, WIDTH = 4, 48, 600, 1100


class Net(nn.Module):
    """One linear layer that is large enough, and what comes before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


class Twice(Net):
    """Uses the layer for more rows than it has samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + super().forward(2 * inputs)


class Long(Net):
    """Many rows per sample: the matrix is less to write than its factors."""

    def forward(self, inputs: Tensor) -> Tensor:
        rows = torch.stack([inputs * shift for shift in range(1, 30)], dim=1)
        return super().forward(rows).mean(1)


class Tied(Net):
    """The matrix is used elsewhere as well, where its gradient is no product."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.first.weight.square().mean(1)[:10]


class Penalized(Net):
    """Asks for gradients of its own on the way, and differentiates through them."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.detach().requires_grad_()
        scores = super().forward(inputs)
        (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        return scores + slope.square().sum(1, keepdim=True)


class Checkpointed(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.first, inputs, use_reentrant=False)
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]


class Transformed(Net):
    """Maps a function over the samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = torch.func.vmap(self.first)(inputs)
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]


NETS: dict[str, Callable[[], Net]] = {
    net.__name__: net for net in (Net, Twice, Long, Tied, Penalized, Checkpointed, Transformed)
}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def _train(
    net: Net,
    workers: int,
    *,
    cut: Callable[[int, int], list[Tensor]] = lambda rank, workers: [torch.arange(SAMPLES)[rank::workers]],
    optimizer: Callable[..., Any] = torch.optim.SGD,
    clip_norm: float | None = None,
    servers: int = 0,
) -> list[Tensor]:
    """The parameters after some steps; `cut` gives the samples of each batch of a worker."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS, SAMPLES, FEATURES, generator=generator)
    targets = torch.randint(0, 10, (STEPS, SAMPLES), generator=generator)

    def work(world: World) -> list[Tensor]:
        model = copy.deepcopy(net)
        settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        session = session_of(
            model,
            optimizer(model.parameters(), lr=0.01, **settings),
            _loss,
            world=world,
            strategy="parameter-server" if servers else "all-reduce",
            clip_norm=clip_norm,
        )
        for step in range(STEPS):
            session.step(*((inputs[step, part], targets[step, part]) for part in cut(world.rank, world.size)))
        assert session.engine.replica.takes_factors == (workers > 1 and clip_norm is None and not servers)
        result = [param.detach().clone() for param in model.parameters()]
        session.close()
        return result

    results = in_threads(workers, work, servers=servers)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    first: list[Tensor] = results[0]
    return first


def _assert_close(ours: list[Tensor], plain: list[Tensor]) -> None:
    for mine, other in zip(ours, plain, strict=True):
        assert float((mine - other).norm() / other.norm()) < 1e-6


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Net:
    torch.manual_seed(1)
    return NETS[getattr(request, "param", "Net")]()


@pytest.mark.parametrize("net", NETS, indirect=True)
@pytest.mark.parametrize("workers", [2, 3])
def test_equal_one_process(net: Net, workers: int) -> None:
    _assert_close(_train(net, workers), _train(net, 1))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_with_other_optimizers(net: Net, optimizer: Callable[..., Any]) -> None:
    for ours, plain in zip(
        _train(net, 2, optimizer=optimizer), _train(net, 1, optimizer=optimizer), strict=True
    ):
        assert float((ours - plain).norm() / plain.norm()) < 1e-5  # Adam divides by what is nearly zero


def test_clipped_gradients_are_matrices(net: Net) -> None:
    _assert_close(_train(net, 2, clip_norm=0.1), _train(net, 1, clip_norm=0.1))


def test_accumulated(net: Net) -> None:
    def cut(rank: int, workers: int) -> list[Tensor]:
        return list(torch.arange(SAMPLES)[rank::workers].split(7))

    _assert_close(_train(net, 2, cut=cut), _train(net, 1))


def test_uneven_and_absent(net: Net) -> None:
    def cut(rank: int, workers: int) -> list[Tensor]:
        return (
            [torch.arange(SAMPLES).split([40, 8])[rank]]
            if rank < 2 and workers > 1
            else [torch.arange(SAMPLES)]
        )

    def absent(rank: int, workers: int) -> list[Tensor]:
        return [torch.arange(SAMPLES)] if rank == 0 else []

    _assert_close(_train(net, 2, cut=cut), _train(net, 1))
    _assert_close(_train(net, 2, cut=absent), _train(net, 1))


def test_the_same_run_gives_the_same_bits() -> None:
    torch.manual_seed(1)
    for net in (Net(), Long()):
        assert all(torch.equal(a, b) for a, b in zip(_train(net, 3), _train(net, 3), strict=True))


@pytest.mark.parametrize("net", NETS, indirect=True)
def test_what_servers_get_equals_one_process(net: Net) -> None:
    _assert_close(_train(net, 2, servers=1), _train(net, 1))


def test_what_servers_get_is_accumulated(net: Net) -> None:
    def cut(rank: int, workers: int) -> list[Tensor]:
        return list(torch.arange(SAMPLES)[rank::workers].split(7))

    _assert_close(_train(net, 2, cut=cut, servers=2), _train(net, 1))


def test_gradients_for_servers_are_made_where_servers_read_them(net: Net) -> None:
    def work(world: World) -> bool:
        model = copy.deepcopy(net)
        session = session_of(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            _loss,
            world=world,
            strategy="parameter-server",
        )
        replica, weight = session.engine.replica, model.first.weight
        assert replica.is_served
        memory = replica.flat.total
        found: list[bool] = []

        def look(param: Tensor) -> None:
            assert param.grad is not None
            start = param.grad.data_ptr() - memory.data_ptr()
            found.append(0 <= start < memory.nbytes)

        weight.register_post_accumulate_grad_hook(look)
        session.step((torch.randn(SAMPLES, FEATURES), torch.zeros(SAMPLES, dtype=torch.long)))
        session.close()
        return found == [True]

    assert in_threads(1, work, servers=1) == [True]
