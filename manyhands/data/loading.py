"""Batches out of data sets, and loading that overlaps training."""

import inspect
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from manyhands import telemetry
from manyhands.data.sets import Samples

T = TypeVar("T")


def gather(dataset: Samples, indices: Tensor, epoch: int) -> Any:
    """These samples as one batch: at once where the data set can, one by one and collated where it cannot."""
    if type(dataset) is Subset:
        # Looked through, so that a part of one of our data sets keeps its fast path and its epochs.
        return gather(dataset.dataset, torch.as_tensor(dataset.indices)[indices], epoch)  # type: ignore[arg-type]
    if _makes_batches(dataset):
        return dataset.batch(indices, epoch)  # type: ignore[attr-defined]
    numbers = indices.tolist()
    if hasattr(dataset, "__getitems__"):
        return default_collate(dataset.__getitems__(numbers))
    return default_collate([dataset[number] for number in numbers])


def _makes_batches(dataset: Any) -> bool:
    """Whether it has `batch(indices, epoch)`; in other packages a method of that name does something else."""
    batch = getattr(dataset, "batch", None)
    if not callable(batch):
        return False
    try:
        return len(inspect.signature(batch).parameters) == 2
    except (TypeError, ValueError):
        return True


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


def waited_for(items: Iterator[T]) -> Iterator[T]:
    """The same items; how long each was waited for is counted as `input_s`."""
    while True:
        with telemetry.timed("input"):
            item = next(items, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order, made up to `depth` ahead by a background thread.

    An error in the iterable is raised here, after the items before it. Leaving the loop early stops the
    thread after the item it is working on, and waits for it.
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
    started, stopping = threading.Event(), threading.Event()

    def produce() -> None:
        # One core for loading: a second team of threads beside the one that trains would slow both.
        torch.set_num_threads(1)
        started.set()
        last: object = _END
        try:
            iterator = iter(iterable)
            for item in iterator:
                if stopping.is_set():
                    # A generator may hold files and locks; close it in the thread that ran it.
                    if isinstance(iterator, Generator):
                        iterator.close()
                    break
                ready.put(item)
        except BaseException as error:
            last = _Failure(error)
        if not stopping.is_set():
            ready.put(last)

    # A daemon, because a generator that is still alive when Python ends would otherwise block it for ever.
    thread = threading.Thread(target=produce, name="manyhands-prefetch", daemon=True)
    threads = torch.get_num_threads()
    thread.start()
    started.wait()
    # Torch also takes the last number set anywhere as the default of threads to come; give them ours back.
    torch.set_num_threads(threads)
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stopping.set()
        # At most one `put` can follow, and emptying the queue makes room for it.
        while not ready.empty():
            ready.get_nowait()
        # The garbage collector may close a forgotten generator from inside the very thread it started.
        if thread is not threading.current_thread():
            thread.join()
