"""Streams without numbers: iterable data sets, divided among the workers as they come.

The ledger cannot count what has no number. Every worker takes other samples of a stream, as long as the stream is the
same on all workers; so the random numbers that it draws are seeded alike on all of them.
"""

import contextlib
import copy
import importlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

from manyhands.data.loader_stream import beginning

_KEPT = "_manyhands_divided"  # on a loader: what is divided of it, so that its processes stay
_WHOLE = ("single_node_only", "split_by_node")  # stages of webdataset that choose shards for a process


class DividedLoader:
    """A loader of an iterable data set: this worker's part of what it gives. `place` says which of how many parts."""

    in_background = False

    def __init__(self, loader: DataLoader[Any], place: Callable[[], tuple[int, int]], seed: int) -> None:
        self._loader = loader
        self._place = place
        self._seed = hash((seed, 1)) & 0x7FFF_FFFF_FFFF_FFFF
        self.note = note_of(loader.dataset, place()[1])

    def __iter__(self) -> Iterator[Any]:
        place, loader = self._place(), self._loader
        if place[1] == 1:
            return iter(loader)
        known = vars(loader).get(_KEPT)
        if known is None or known[0] != place:
            known = vars(loader)[_KEPT] = (place, _divided(loader, *place, self._seed))
        if loader.num_workers:
            return iter(known[1])  # its processes are seeded alike
        return _drawing_alike(known[1], self._seed)

    def __len__(self) -> int:
        return -(-len(self._loader) // self._place()[1])


class EveryNth(IterableDataset[Any]):
    """One of so many parts of a stream: each n-th sample, beginning with one of the first."""

    def __init__(self, dataset: Any, first: int, parts: int) -> None:
        self.__dict__.update(dataset=dataset, first=first, parts=parts)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.dataset), self.first, None, self.parts)

    # A script's worker_init_fn reads and changes the data set that it finds in a process of the loader.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


class _ShardChoice:
    """A stage of webdataset: one of so many parts of the shards."""

    def __init__(self, first: int, parts: int) -> None:
        self._first = first
        self._parts = parts

    def __call__(self, shards: Any) -> Iterator[Any]:
        return itertools.islice(shards, self._first, None, self._parts)


def divide(dataset: Any, first: int, parts: int) -> Any:
    """One of so many parts of a stream, by the means that it has for that, else every so many-th sample."""
    if _is_of_hugging_face(dataset):
        if dataset._distributed is not None:
            return dataset
        split = importlib.import_module("datasets.distributed").split_dataset_by_node
        return split(dataset, rank=first, world_size=parts)
    if _is_of_webdataset(dataset):
        divided = copy.copy(dataset)
        divided.pipeline = [
            _ShardChoice(first, parts) if getattr(stage, "__name__", "") in _WHOLE else stage
            for stage in dataset.pipeline
        ]
        return divided
    return EveryNth(dataset, first, parts)


def note_of(dataset: Any, parts: int) -> str:
    """What a person should know, in one line."""
    if parts == 1:
        return ""
    name = type(dataset).__name__
    if _is_of_hugging_face(dataset) and dataset._distributed is not None:
        return f"{name} is divided among processes already (split_dataset_by_node), and is taken as it is"
    what = "its shards" if _is_of_webdataset(dataset) else "its shards or samples"
    return (
        f"{name} is a stream: each of {parts} workers takes other ones of {what}; what a worker has read when it dies "
        "is not read again in this epoch"
    )


def _is_of_hugging_face(dataset: Any) -> bool:
    return hasattr(dataset, "_distributed") and hasattr(dataset, "_ex_iterable")


def _is_of_webdataset(dataset: Any) -> bool:
    stages = getattr(dataset, "pipeline", None)
    return isinstance(stages, list) and any(getattr(stage, "__name__", "") in _WHOLE for stage in stages)


def _divided(loader: DataLoader[Any], first: int, parts: int, seed: int) -> DataLoader[Any]:
    more: dict[str, Any] = {"batch_size": loader.batch_size}
    if loader.batch_size is not None:
        more["drop_last"] = loader.drop_last
    if loader.num_workers:
        more["multiprocessing_context"] = loader.multiprocessing_context
        more["prefetch_factor"] = loader.prefetch_factor
        more["persistent_workers"] = loader.persistent_workers
    return DataLoader(
        divide(loader.dataset, first, parts),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=beginning(loader),
        generator=loader.generator or torch.Generator().manual_seed(seed),
        **more,
    )


def _drawing_alike(batches: Any, seed: int) -> Iterator[Any]:
    """What a loader without processes gives; what the data draw is apart from what the model draws."""
    numbers = _RandomStream(seed)
    with numbers.drawn():
        iterator = iter(batches)
    while True:
        with numbers.drawn():
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


_END = object()


class _RandomStream:
    """A stream of random numbers beside that of the process."""

    def __init__(self, seed: int) -> None:
        before = _state()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFF_FFFF)
        self._theirs = _state()
        _set(before)

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        before = _state()
        _set(self._theirs)
        try:
            yield
        finally:
            self._theirs = _state()
            _set(before)


def _state() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def _set(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])


def is_stream(data: Any) -> bool:
    """Whether samples come out of it one after the other, and have no numbers."""
    return isinstance(data, IterableDataset) or _is_of_hugging_face(data) or _is_of_webdataset(data)
