"""A sample has the same number on all workers, or the run is refused."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.sessions import session_of
from tests.threads import in_threads

ALL = TensorDataset(torch.arange(40.0).view(40, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0] if isinstance(batch, (tuple, list)) else torch.as_tensor(batch).view(-1, 1)
    value: Tensor = model(inputs.float()).square().mean()
    return value


class Packaged(Dataset[Any]):
    """As data sets of other packages: `batch` is something else than samples by number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])

    def batch(self, batch_size: int, drop_last: bool = False, workers: int | None = None) -> "Packaged":
        raise AssertionError("makes another data set")


def run(world: World, data: Any, strategy: str = "all-reduce") -> list[float]:
    net = nn.Linear(1, 1)
    session = session_of(
        net, torch.optim.SGD(net.parameters(), lr=1e-4), loss, world=world, strategy=strategy
    )
    seen: list[float] = []
    try:
        for batch in session.batches(data, **({} if isinstance(data, DataLoader) else {"batch_size": 4})):
            session.step(batch)
            first = batch[0] if isinstance(batch, (tuple, list)) else batch
            seen += torch.as_tensor(first).flatten().tolist()
    finally:
        session.close()
    return seen


def permuted(seed: int) -> list[int]:
    return torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()


MADE: dict[str, Callable[[int], Any]] = {
    "a split": lambda seed: Subset(ALL, permuted(seed)[:24]),
    "a split in a loader": lambda seed: DataLoader(
        Subset(ALL, permuted(seed)[:24]), batch_size=4, shuffle=True
    ),
    "indices in an array": lambda seed: Subset(ALL, numpy.array(permuted(seed)[:24])),  # type: ignore[arg-type]
    "a split inside of others": lambda seed: Subset(
        ConcatDataset([ALL, Subset(ALL, permuted(seed))]), range(24)
    ),
    "a list": lambda seed: [float(number) for number in permuted(seed)[:24]],
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_what_every_worker_has_drawn_for_itself_is_refused(strategy: str, name: str) -> None:
    def work(world: World) -> None:
        with pytest.raises(UsageError, match="have different samples, or the same in another order"):
            run(world, MADE[name](world.rank), strategy)

    in_threads(2, work)


@pytest.mark.parametrize("name", MADE)
def test_what_all_have_drawn_alike_is_dealt_once(name: str) -> None:
    first, second = in_threads(2, lambda world: run(world, MADE[name](5)))
    assert len(set(first) | set(second)) == len(first + second) == 24


def test_a_method_called_batch_that_does_something_else() -> None:
    first, second = in_threads(2, lambda world: run(world, Packaged()))
    assert sorted(first + second) == [float(number) for number in range(12)]
