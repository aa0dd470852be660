"""Whole batches from any data set, and a background thread that never stays behind."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from manyhands.data import gather, load, prefetch
from manyhands.data.loading import prefetch as prefetch_in_module
from manyhands.data.structure import empty_like, samples_in


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "manyhands-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    assert threads() == []


def test_gives_the_same_items_in_order() -> None:
    assert list(prefetch(range(100), depth=3)) == list(range(100))
    assert list(prefetch([])) == []
    assert prefetch is prefetch_in_module


def test_works_ahead_by_its_depth_and_no_more() -> None:
    made: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            if number == 3:
                third.set()
            yield number

    stream = prefetch(items(), depth=2)
    assert next(stream) == 0
    # Item 0 is taken, 1 and 2 are ready, and 3 is made and waits for room.
    assert third.wait(timeout=20)
    assert made == [0, 1, 2, 3]
    stream.close()


def test_runs_in_another_thread_with_one_core_and_leaves_ours_alone() -> None:
    before = torch.get_num_threads()
    seen = list(prefetch((threading.current_thread().name, torch.get_num_threads()) for _ in range(2)))
    assert seen == [("manyhands-prefetch", 1)] * 2
    assert torch.get_num_threads() == before


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("the third is broken")

    got: list[int] = []
    with pytest.raises(ValueError, match="the third is broken"):
        got.extend(prefetch(items()))  # extend keeps what came before the error
    assert got == [1, 2]
    assert threads() == []


def test_leaving_early_closes_the_source_and_joins() -> None:
    closed: list[str] = []

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(threading.current_thread().name)

    stream = prefetch(items(), depth=1)
    next(stream)
    assert len(threads()) == 1
    stream.close()
    assert threads() == []
    assert closed == ["manyhands-prefetch"]


def test_a_forgotten_generator_stops_its_thread() -> None:
    def consume() -> None:
        for item in prefetch(iter(int, 1)):
            assert item == 0
            break

    consume()
    gc.collect()
    assert threads() == []


def test_an_error_of_the_consumer_stops_the_thread() -> None:
    def consume() -> None:
        for _ in prefetch(iter(int, 1)):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        consume()
    gc.collect()
    assert threads() == []


def test_never_started_has_no_thread() -> None:
    prefetch(range(3))
    assert threads() == []


class Plain(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": index / 2}


class Many(Plain):
    def __getitems__(self, indices: list[int]) -> list[dict[str, float]]:
        return [{"x": index * 10.0} for index in indices]


def test_gather_uses_what_the_data_set_offers() -> None:
    indices = torch.tensor([3, 1])
    assert gather(Plain(), indices, 0)["x"].tolist() == [1.5, 0.5]
    assert gather(Many(), indices, 0)["x"].tolist() == [30.0, 10.0]
    inputs, targets = gather(TensorDataset(torch.arange(10), torch.arange(10) * 2), indices, 0)
    assert inputs.tolist() == [3, 1]
    assert targets.tolist() == [6, 2]


def test_gather_looks_through_subsets() -> None:
    data = load("digits").train
    part = Subset(Subset(data, [5, 6, 7, 8]), [3, 0])
    images, labels = gather(part, torch.tensor([0, 1]), 4)
    expected = data.batch(torch.tensor([8, 5]), 4)
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


def test_our_sets_are_ordinary_torch_data_sets() -> None:
    data = load("digits").test
    images, labels = next(iter(DataLoader(data, batch_size=8)))
    expected = data.batch(torch.arange(8), 0)
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])
    assert sum(1 for _ in data) == len(data)
    assert torch.equal(data[-1][0], data[len(data) - 1][0])


def test_samples_in_batches_of_any_structure() -> None:
    images = torch.zeros(5, 3, 4, 4)
    assert samples_in(images) == 5
    assert samples_in((images, torch.zeros(5))) == 5
    assert samples_in([["a", "b", "c"], torch.zeros(3)]) == 3
    assert samples_in((["one", "two"], ["x", "y"])) == 2
    assert samples_in({"pixels": images, "labels": torch.zeros(5)}) == 5
    assert samples_in(([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [{}, {}])) == 2
    assert samples_in(()) == 0


def test_an_empty_batch_has_the_structure_of_a_full_one() -> None:
    batch = (torch.zeros(2, 3), {"labels": torch.zeros(2), "names": ["a", "b"]})
    empty = empty_like(batch)
    assert empty[0].shape == (0, 3)
    assert empty[1]["names"] == []
    assert samples_in(empty) == 0
