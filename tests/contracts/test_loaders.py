"""A DataLoader given to the session: its own machinery loads, the ledger says what, and each sample is used once."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from manyhands.cluster.worker.world import World
from manyhands.data.ledger import DrawnOrder
from manyhands.errors import UsageError
from tests.contracts.test_resuming import EVERY_KIND
from tests.contracts.test_sessions import Numbered, make_session, numbers
from tests.threads import in_threads

LENGTH = 50

Steps = list[list[int]]


def steps_of(
    make: Callable[[], DataLoader[Any]], *, workers: int = 2, strategy: str = "all-reduce", epochs: int = 1
) -> list[list[Steps]]:
    """By worker and epoch: the samples of each step."""

    def work(world: World) -> list[Steps]:
        session, loader = make_session(world, strategy), make()
        used = []
        for _ in range(epochs):
            steps = []
            for batch in session.batches(loader):
                session.step(batch)
                steps.append(numbers(batch))
            used.append(steps)
        session.close()
        report = session.summary()["committed"]
        assert (report["twice"], report["never"], report["left"]) == (0, 0, 0)
        assert report["once"] == session.samples
        return used

    return in_threads(workers, work, strategy=strategy)


def every(results: list[list[Steps]], epoch: int = 0) -> list[int]:
    return [number for worker in results for step in worker[epoch] for number in step]


def in_turn(results: list[list[Steps]], epoch: int = 0) -> list[int]:
    """In the order of steps and workers."""
    rounds = zip(*(worker[epoch] for worker in results), strict=True)
    return [number for steps in rounds for step in steps for number in step]


@pytest.mark.parametrize("strategy", EVERY_KIND)
def test_every_sample_of_a_loader_is_used_once(strategy: str) -> None:
    results = steps_of(
        lambda: DataLoader(Numbered(LENGTH), batch_size=4, shuffle=True),
        strategy=strategy,
        workers=3,
        epochs=2,
    )
    for epoch in range(2):
        assert sorted(every(results, epoch)) == list(range(LENGTH))
    assert every(results, 0) != every(results, 1)


def test_samples_come_in_order_where_the_loader_says_nothing_else() -> None:
    results = steps_of(lambda: DataLoader(Numbered(LENGTH), batch_size=5))
    assert in_turn(results) == list(range(LENGTH))
    assert {len(step) for worker in results for step in worker[0]} == {5}, (
        "its batch size is that of a worker"
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_shuffling_is_that_of_the_ledger(workers: int) -> None:
    def shuffled(workers: int) -> list[int]:
        loader = DataLoader(Numbered(48), shuffle=True, batch_size=12 // workers)
        return in_turn(steps_of(lambda: loader, workers=workers))

    assert shuffled(workers) == shuffled(1)
    assert sorted(shuffled(1)) == list(range(48)) != shuffled(1)


class Backwards(Sampler[int]):
    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH - 1, -1, -1))


@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild", "parameter-server:async"])
def test_the_order_of_a_sampler_is_kept(strategy: str) -> None:
    results = steps_of(lambda: DataLoader(Numbered(LENGTH), 5, sampler=Backwards()), strategy=strategy)
    assert in_turn(results) == list(range(LENGTH))[::-1]


def test_weighted_samples_are_drawn_once_for_all_workers() -> None:
    """Every worker has another generator; that of worker 0 counts."""
    weights = [1.0] * 10 + [0.0] * (LENGTH - 10)

    def make() -> DataLoader[Any]:
        generator = torch.Generator()
        generator.seed()
        return DataLoader(
            Numbered(LENGTH), 5, sampler=WeightedRandomSampler(weights, 40, generator=generator)
        )

    results = steps_of(make, workers=4, epochs=2)
    for epoch in range(2):
        counts = Counter(every(results, epoch))
        assert counts.total() == 40
        assert max(counts) < 10


def test_one_worker_gets_what_plain_pytorch_gives_of_a_sampler() -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Numbered(LENGTH), 8, sampler=SubsetRandomSampler(range(9, 40), generator=generator))

    loader = make()
    plain = [[numbers(batch) for batch in loader] for _ in range(2)]
    assert steps_of(make, workers=1, epochs=2) == [plain]


def lengths(batches: Steps) -> list[int]:
    return [len(batch) for batch in batches]


class Buckets(Sampler[list[int]]):
    """Batches of many sizes, as samplers by length make them."""

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, LENGTH, 10):
            yield list(range(first, first + 3))
            yield list(range(first + 3, first + 10))


@pytest.mark.parametrize("strategy", EVERY_KIND)
def test_the_batches_of_a_batch_sampler_are_dealt_to_the_workers(strategy: str) -> None:
    results = steps_of(
        lambda: DataLoader(Numbered(LENGTH), batch_sampler=Buckets()), strategy=strategy, epochs=2
    )
    assert sorted(every(results)) == list(range(LENGTH))
    assert [lengths(worker[0]) for worker in results] == [[3] * 5, [7] * 5]


def test_items_that_are_batches_already_are_dealt_to_the_workers() -> None:
    class Batched(Numbered):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.inputs[index * 5 : index * 5 + 5], self.targets[index * 5 : index * 5 + 5]

    def work(world: World) -> list[int]:
        session, used = make_session(world), []
        for batch in session.batches(DataLoader(Batched(LENGTH), batch_size=None, shuffle=True)):
            session.step(batch)
            used += numbers(batch)
        session.close()
        return used

    results = in_threads(2, work)
    assert sorted(number for used in results for number in used) == list(range(35))


@pytest.mark.parametrize("sampler", [None, SequentialSampler(range(LENGTH)), Backwards()])
def test_the_last_samples_are_dropped_where_the_loader_says_so(sampler: Any) -> None:
    results = steps_of(
        lambda: DataLoader(
            Numbered(LENGTH), batch_sampler=BatchSampler(sampler or RandomSampler(range(LENGTH)), 4, True)
        )
    )
    assert {len(step) for worker in results for step in worker[0]} == {4}
    assert len(set(every(results))) == 48


def test_a_distributed_sampler_is_replaced_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> list[int]:
        session, data = make_session(world), Numbered(LENGTH)
        sampler = DistributedSampler(data, world.size, world.rank, shuffle=False)
        loader, used = DataLoader(data, 5, sampler=sampler), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in session.batches(loader):
                session.step(batch)
                used += numbers(batch)
        session.close()
        return used

    first, second = in_threads(2, work)
    assert sorted(first + second) == sorted(2 * list(range(LENGTH)))
    assert capsys.readouterr().err.count("DistributedSampler of the loader is not used") == 1


def test_a_loader_has_a_length() -> None:
    def work(world: World) -> list[int]:
        session, data = make_session(world), Numbered(LENGTH)
        loaders: list[DataLoader[Any]] = [
            DataLoader(data, 5),
            DataLoader(data, 8, drop_last=True),
            DataLoader(data, 8, sampler=Backwards()),
            DataLoader(data, batch_size=None),
        ]
        found = [len(session.batches(loader)) for loader in loaders]
        with pytest.raises(TypeError):
            len(session.batches(DataLoader(data, batch_sampler=Buckets())))
        session.close()
        return found

    assert in_threads(2, work) == [[5, 3, 4, 25]] * 2


class Listing(Sampler[Any]):
    num_replicas = 2

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda data: DataLoader(data, 5, sampler=Listing(range(4))),
            "divides the data among 2 workers already",
        ),
        (lambda data: Own(data, 5), "has its own __iter__"),
        (lambda data: DataLoader(data, 40, drop_last=True), "leaves nothing of 50 samples"),
    ],
)
def test_what_would_be_wrong_is_refused(make: Callable[[Any], Any], reason: str) -> None:
    def work(world: World) -> None:
        session = make_session(world)
        try:
            next(iter(session.batches(make(Numbered(LENGTH)))))
        finally:
            session.close()

    with pytest.raises(UsageError, match=reason):
        in_threads(2, work)


def test_a_sampler_of_other_things_than_numbers_is_refused() -> None:
    class Names(Sampler[str]):
        def __iter__(self) -> Iterator[str]:
            return iter(["a", "b"])

    def work(world: World) -> None:
        session = make_session(world)
        next(iter(session.batches(DataLoader(Numbered(LENGTH), 5, sampler=Names()))))

    with pytest.raises(UsageError, match="the ledger counts samples by number"):
        in_threads(1, work)


@pytest.mark.processes
@pytest.mark.parametrize("sampler", [None, "drawn", "dealt"])
def test_a_run_that_resumes_gets_the_rest_of_the_same_order(sampler: str | None, tmp_path: Path) -> None:
    """A generator that begins anew would draw another order."""

    def loader() -> DataLoader[Any]:
        data, generator = Numbered(LENGTH), torch.Generator()
        generator.seed()
        if sampler is None:
            return DataLoader(data, 4, shuffle=True)
        drawn = SubsetRandomSampler(range(LENGTH), generator=generator)
        if sampler == "drawn":
            return DataLoader(data, 4, sampler=drawn)

        class Dealt(BatchSampler):
            pass

        return DataLoader(data, batch_sampler=Dealt(drawn, 4, False))

    def leg(world: World, steps: int | None) -> list[int]:
        session = make_session(world)
        session.resume(tmp_path)
        used = []
        for number, batch in enumerate(session.batches(loader()), 1):
            session.step(batch)
            used += numbers(batch)
            if number == steps:
                break
        session.save(tmp_path)
        session.close()
        return used

    used = []
    for workers, steps in ((3, 2), (2, 1), (2, None)):
        for one in in_threads(workers, lambda world, steps=steps: leg(world, steps)):
            used += one
    assert sorted(used) == list(range(LENGTH))


def test_an_order_survives_being_written() -> None:
    batches = DrawnOrder(torch.tensor([5, 3, 9, 9, 1]), torch.tensor([2, 2, 5]))
    again = DrawnOrder.decode(batches.encode())
    assert [again.batch(place).tolist() for place in range(3)] == [[5, 3], [], [9, 9, 1]]
    plain = DrawnOrder.decode(DrawnOrder(torch.tensor([2, 0])).encode())
    assert (plain.numbers.tolist(), plain.ends) == ([2, 0], None)


def without_odd(items: list[Any]) -> Any:
    """As people write it who leave bad samples out: nothing is left of some batches."""
    left = [item for item in items if int(numbers(torch.utils.data.default_collate([item]))[0]) // 4 % 5 != 3]
    return torch.utils.data.default_collate(left) if left else None


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_that_are_none_are_the_scripts_to_skip(workers: int) -> None:
    def work(world: World) -> tuple[list[int], int]:
        session = make_session(world, "all-reduce")
        used, skipped = [], 0
        for batch in session.batches(DataLoader(Numbered(40), batch_size=4, collate_fn=without_odd)):
            if batch is None:
                skipped += 1
                continue
            session.step(batch)
            used += numbers(batch)
        session.close()
        return used, skipped

    results = in_threads(workers, work)
    wanted = [number for number in range(40) if number // 4 % 5 != 3]
    assert sorted(number for used, _ in results for number in used) == wanted
    assert sum(skipped for _, skipped in results) == 2
