"""Batches out of data sets, and loading that overlaps training."""

import itertools
import queue
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from manyhands.data.sets import Samples

T = TypeVar("T")


def gather(dataset: Samples, indices: Tensor, epoch: int) -> Any:
    """These samples as one batch: at once where the data set can, one by one and collated where it cannot."""
    if type(dataset) is Subset:
        # Looked through, so that a part of one of our data sets keeps its fast path and its epochs.
        return gather(dataset.dataset, torch.as_tensor(dataset.indices)[indices], epoch)  # type: ignore[arg-type]
    batch = getattr(dataset, "batch", None)
    if callable(batch):
        return batch(indices, epoch)
    numbers = indices.tolist()
    if hasattr(dataset, "__getitems__"):
        return default_collate(dataset.__getitems__(numbers))
    return default_collate([dataset[number] for number in numbers])


def samples_in(batch: Any) -> int:
    """How many samples a batch has: of its fields the first tensor's first dimension, else the first one's length."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    fields = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(fields, (list, tuple)):
        return len(batch) if hasattr(batch, "__len__") else 1
    for field in fields:
        if isinstance(field, Tensor) and field.dim():
            return int(field.shape[0])
    if not fields:
        return 0
    return samples_in(fields[0]) if isinstance(fields[0], Mapping) else len(fields[0])


def parts_of(
    batches: Sequence[Any], limit: int | None, device: torch.device | None
) -> tuple[list[tuple[Any, int]], int]:
    """What a step computes one after the other, and the samples in all: batches with their numbers of samples, those
    without any left out; cut into pieces of at most `limit` samples, and moved to the device, where these are given."""
    pieces = [piece for batch in batches for piece in split(batch, limit)] if limit else batches
    if device is not None:
        pieces = [moved(piece, device) for piece in pieces]
    parts = [(piece, samples) for piece in pieces if (samples := samples_in(piece))]
    return parts, sum([samples for _, samples in parts])


def empty_like(batch: Any) -> Any:
    """A batch of the same structure without samples."""
    if isinstance(batch, Mapping):
        return {key: empty_like(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(empty_like(value) for value in batch)
    if isinstance(batch, list):
        return [empty_like(value) for value in batch if not isinstance(value, str)]
    return batch[:0] if isinstance(batch, Tensor) and batch.dim() else batch


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; what is there already, and what is no tensor, stays as it is."""
    if hasattr(batch, "to"):  # a packed sequence leaves its lengths where they are
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(value, device) for value in batch)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    return batch


def split(batch: Any, limit: int) -> list[Any]:
    """The batch in pieces of at most so many samples, as equal as can be; whole if it is of an unknown structure."""
    count = samples_in(batch)
    if count <= limit or not _can_split(batch):
        return [batch]
    pieces = -(-count // limit)
    edges = [count * piece // pieces for piece in range(pieces + 1)]
    return [_part(batch, slice(first, last)) for first, last in itertools.pairwise(edges)]


def _can_split(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return all(_can_split(value) for value in batch.values())
    if type(batch) in (tuple, list):
        return all(_can_split(value) for value in batch)
    return isinstance(batch, Tensor) and batch.dim() > 0


def _part(batch: Any, where: slice) -> Any:
    if isinstance(batch, Mapping):
        return {key: _part(value, where) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_part(value, where) for value in batch)
    return batch[where]


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


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
