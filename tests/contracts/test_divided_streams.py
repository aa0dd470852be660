"""Iterable data sets: every worker takes other samples, whatever draws random numbers in them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from manyhands.cluster.worker.world import World
from manyhands.data.divided_streams import EveryNth, divide, note_of
from tests.contracts.test_sessions import make_session
from tests.threads import in_threads

LENGTH = 40


class Stream(IterableDataset[Any]):
    """Samples that a shuffling buffer gives, split among a loader's processes as PyTorch's pages say."""

    def __init__(self, *, shuffles: bool = False) -> None:
        self.start, self.end = 0, LENGTH
        self.shuffles = shuffles

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        numbers = list(range(self.start, self.end))
        if info is not None:
            numbers = numbers[info.id :: info.num_workers]
        if self.shuffles:
            random.shuffle(numbers)
        for number in numbers:
            yield torch.full((1, 4, 4), number / 1000, dtype=torch.float64), number % 4


def used(make: Callable[[], Any], *, workers: int = 2, epochs: int = 1, **more: Any) -> list[list[int]]:
    def work(world: World) -> list[int]:
        session, data, seen = make_session(world), make(), []
        for _ in range(epochs):
            for batch in session.batches(data, **more):
                session.step(batch)
                seen += [round(value * 1000) for value in batch[0][:, 0, 0, 0].tolist()]
        session.close()
        return seen

    return in_threads(workers, work)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_worker_takes_other_samples(workers: int) -> None:
    results = used(lambda: DataLoader(Stream(), batch_size=4), workers=workers, epochs=2)
    assert sorted(number for seen in results for number in seen) == sorted(2 * list(range(LENGTH)))


def test_a_stream_without_a_loader_needs_a_batch_size() -> None:
    results = used(Stream, batch_size=5)
    assert sorted(number for seen in results for number in seen) == list(range(LENGTH))


@pytest.mark.processes
def test_processes_of_the_loader_have_other_parts_of_each_part() -> None:
    results = used(lambda: DataLoader(Stream(), batch_size=4, num_workers=2))
    assert sorted(number for seen in results for number in seen) == list(range(LENGTH))


def change_the_end(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.end = 20


@pytest.mark.processes
def test_a_worker_init_function_sees_the_scripts_own_data_set() -> None:
    results = used(lambda: DataLoader(Stream(), 4, num_workers=1, worker_init_fn=change_the_end))
    assert sorted(number for seen in results for number in seen) == list(range(20))


def test_the_line_that_says_what_a_stream_promises(capsys: pytest.CaptureFixture[str]) -> None:
    used(lambda: DataLoader(Stream(), batch_size=4), epochs=2)
    assert capsys.readouterr().err.count("Stream is a stream: each of 2 workers takes other ones") == 1


def test_streams_that_draw_are_alike_on_all_workers_and_leave_the_process_its_numbers() -> None:
    from manyhands.data.divided_streams import DividedLoader

    parts = []
    for first in range(2):
        random.seed(first)  # as if each were a process of its own
        before = random.getstate()
        loader = DividedLoader(DataLoader(Stream(shuffles=True), 4), lambda first=first: (first, 2), seed=3)
        parts.append([number for _, targets in [*loader, *loader] for number in targets.tolist()])
        seen = [round(v * 1000) for inputs, _ in loader for v in inputs[:, 0, 0, 0].tolist()]
        parts[-1] = seen
        assert random.getstate() == before
    assert sorted(parts[0] + parts[1]) == list(range(LENGTH))
    assert parts[0] != sorted(parts[0])


class HuggingFace:
    """The shape of `datasets.IterableDataset`, as far as it is looked at."""

    def __init__(self, distributed: Any = None) -> None:
        self._distributed = distributed
        self._ex_iterable = object()


def test_what_is_divided_already_is_taken_as_it_is() -> None:
    data = HuggingFace(distributed=(0, 2))
    assert divide(data, 1, 2) is data
    assert "divided among processes already" in note_of(data, 2)


def test_shards_of_webdataset_are_divided() -> None:
    def single_node_only(shards: Any) -> Iterator[Any]:
        raise AssertionError("there are several workers")

    class Web:
        def __init__(self) -> None:
            self.pipeline = [lambda: iter(range(8)), single_node_only, list]

    data = Web()
    source, chosen, last = divide(data, 1, 3).pipeline
    assert list(chosen(source())) == [1, 4, 7]
    assert data.pipeline[1] is single_node_only
    assert last is list


def test_the_wrapper_is_seen_through() -> None:
    stream = Stream()
    part = EveryNth(stream, 1, 2)
    part.end = 6
    assert (stream.end, part.start) == (6, 0)
    assert [number for _, number in part] == [1, 3, 1]
