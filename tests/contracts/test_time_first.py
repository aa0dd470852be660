"""Batches whose first dimension is not their samples: sequences with time there, or that lie end to end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.sessions import session_of
from tests.threads import in_threads

LENGTHS = (3, 9, 4, 8, 7, 2, 5, 6, 3, 9, 2, 8, 4, 7, 6, 5)
Sample = tuple[Tensor, Tensor]


class Sequences(Dataset[Sample]):
    """Of different lengths."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Sample:
        values = torch.sin(torch.arange(LENGTHS[index] * 3.0) + index).reshape(-1, 3)
        return values, values.sum()


def time_first(samples: list[Sample]) -> Sample:
    sequences, targets = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(sequences)), torch.stack(targets)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(3, 4), nn.Linear(4, 1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.3 * torch.cos(torch.arange(param.numel())).view_as(param))

    def forward(self, inputs: Tensor) -> Tensor:
        last: Tensor = self.out(self.cells(inputs)[0].sum(0))
        return last.squeeze(1)


def loss(model: nn.Module, batch: Sample) -> Tensor:
    found = model(batch[0])
    return F.mse_loss(found, batch[1].mean().expand_as(found))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def end_to_end(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """As `nn.EmbeddingBag` takes them."""
    words = [values[:, 0].abs().mul(10).long() % 7 for values, _ in samples]
    begins = torch.tensor([0, *map(len, words[:-1])]).cumsum(0)
    return torch.cat(words), begins, torch.stack([target for _, target in samples])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(7, 4), nn.Linear(4, 1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.3 * torch.cos(torch.arange(param.numel())).view_as(param))

    def forward(self, words: Tensor, begins: Tensor) -> Tensor:
        found: Tensor = self.out(self.table(words, begins))
        return found.squeeze(1)


def bag_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(*batch[:2]), batch[2])


class InTurn:
    """Two samples at a time, as batches of a sampler of the script's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[first, first + 1] for first in range(0, len(LENGTHS), 2)])

    def __len__(self) -> int:
        return len(LENGTHS) // 2


def loader(kind: str) -> Any:
    if kind == "sampler of batches":
        return DataLoader(Sequences(), batch_sampler=InTurn(), collate_fn=time_first)  # type: ignore[arg-type]
    return DataLoader(Sequences(), batch_size=2, collate_fn=time_first)


def one_process() -> dict[str, Tensor]:
    model = Reader()
    optimizer = sgd(model)
    data = Sequences()
    for first in range(0, len(LENGTHS), 4):  # two workers with two samples each
        halves = [time_first([data[first + more], data[first + more + 1]]) for more in (0, 2)]
        optimizer.zero_grad()
        sum(loss(model, half) / 2 for half in halves).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("kind", ["batch size", "sampler of batches", "own batches"])
def test_the_session_counts_samples_and_not_time(kind: str) -> None:
    """From a loader it knows how many there are; of batches that a script makes itself `samples=` tells it."""

    def work(world: World) -> tuple[int, dict[str, Tensor]]:
        model = Reader()
        own = kind == "own batches"
        told = {"samples": lambda batch: batch[0].shape[1]} if own else {}
        session = session_of(model, sgd(model), loss, world=world, **told)
        batches: Any = list(loader("batch size"))[world.rank :: 2] if own else loader(kind)
        for batch in session.batches(batches):
            session.step(batch)
        session.close()
        return session.samples, {name: value.clone() for name, value in model.state_dict().items()}

    plain = one_process()
    for samples, state in in_threads(2, work):
        assert samples == len(LENGTHS)
        for name, value in plain.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [False, True])
def test_sequences_that_lie_end_to_end(own: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """From a loader they count by samples; of batches that a script makes itself a warning says that they do not."""

    def work(world: World) -> tuple[int, dict[str, Tensor]]:
        model = Bag()
        session = session_of(model, sgd(model), bag_loss, world=world)
        batches: Any = DataLoader(Sequences(), batch_size=2, collate_fn=end_to_end)
        for batch in session.batches(list(batches)[world.rank :: 2] if own else batches):
            session.step(batch)
        session.close()
        return session.samples, {name: value.clone() for name, value in model.state_dict().items()}

    plain = Bag()
    optimizer = sgd(plain)
    for first in range(0, len(LENGTHS), 4):
        optimizer.zero_grad()
        bag_loss(plain, end_to_end([Sequences()[first + more] for more in range(4)])).backward()
        optimizer.step()
    for samples, state in in_threads(2, work):
        assert own or samples == len(LENGTHS)
        for name, value in plain.state_dict().items():
            assert own or torch.allclose(state[name], value, rtol=1e-5, atol=1e-6)
    assert ("sequences lie end to end" in capsys.readouterr().err) == own


@pytest.mark.parametrize("kind", ["turned by the script", "made anew", "own batches", "samples first"])
def test_time_in_the_first_dimension_is_spoken_of(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> None:
        model = Reader()
        session = session_of(model, sgd(model), loss, world=world)
        if kind == "own batches":
            for batch in list(loader("batch size"))[world.rank :: 2]:
                session.step(batch)
        elif kind in ("turned by the script", "made anew"):
            for inputs, targets in session.batches(loader("batch size")):
                session.step((inputs.clone(), targets.clone() if kind == "made anew" else targets))
        else:
            data = TensorDataset(torch.ones(18, 4, 3), torch.ones(18))
            for inputs, targets in session.batches(data, batch_size=4):  # the last ones have one sample
                session.step((inputs.clone(), targets.clone()))
        session.close()

    in_threads(2, work)
    said = capsys.readouterr().err
    assert said.count("as where time comes first, or sequences lie end to end") == (
        kind in ("own batches", "made anew")
    )


def test_a_pipeline_refuses_time_first() -> None:
    def work(world: World) -> None:
        model = Reader()
        session = session_of(
            model, sgd(model), loss, world=world, placement="pipeline:stages=2,microbatches=2"
        )
        for batch in session.batches(loader("batch size")):
            session.step(batch)

    with pytest.raises(UsageError, match="first dimension"):
        in_threads(2, work)


@pytest.mark.parametrize("found", [1.5, -1, None, True])
def test_what_is_no_number_of_samples_is_refused(found: Any) -> None:
    model = Reader()

    def work(world: World) -> None:
        session = session_of(model, sgd(model), loss, world=world, samples=lambda batch: found)
        with pytest.raises(UsageError, match="a whole number"):
            session.step(time_first([Sequences()[0]]))
        session.close()

    in_threads(1, work)


def test_the_script_may_count_what_the_session_cannot() -> None:
    class Opaque:
        __slots__ = ("rows",)

        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

    def work(world: World) -> int:
        model = nn.Linear(3, 1)
        session = session_of(
            model,
            sgd(model),
            lambda model, batch: model(batch.rows).square().mean(),
            world=world,
            samples=lambda batch: len(batch.rows),
        )
        session.step(Opaque(torch.ones(5, 3)))
        session.close()
        return session.samples

    assert in_threads(2, work) == [10, 10]
