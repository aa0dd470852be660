"""What a batch may be: tensors, tuples, mappings, dataclasses and objects, nested as a script likes."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from manyhands.errors import UsageError

_ONE = (int, float, complex, bool, type(None))  # a batch that is a number, or nothing, is one sample
_SIZES = ("num_graphs", "batch_size")  # how objects of graph and tensor libraries say it


def samples_in(batch: Any) -> int:
    """How many samples a batch has: of its fields the first tensor's first dimension, else what the others agree on."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, (tuple, list, Mapping)) and not isinstance(batch, PackedSequence):
        for field in batch.values() if isinstance(batch, Mapping) else batch:
            if isinstance(field, Tensor) and field.dim():
                return int(field.shape[0])
    count = _count(batch)
    if count is None:
        raise UsageError(
            f"the session cannot tell how many samples a batch of type {type(batch).__name__} has, and weights it by "
            "them: give it __len__, or put its tensors into a tuple, a dict or a dataclass"
        )
    return count


def samples_of(batch: Any, made_of: int) -> int:
    """As above, of a batch that was made of so many samples. Its first dimension is another number where sequences have
    time there, or lie end to end; then other tensors show it."""
    count = samples_in(batch)
    is_other = count not in (0, made_of) and made_of > 1
    return made_of if is_other and may_have(batch, made_of) else count


def may_have(batch: Any, samples: int) -> bool:
    """Whether a batch may have so many samples although its first tensor has another number of rows: some other tensor
    has a row for each, or all have them in the first or second dimension, or a number of elements for each."""
    found = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if any(len(tensor) == samples for tensor in found):
        return True
    return any(tensor.dim() > 1 and tensor.shape[1] == samples for tensor in found) and all(
        samples in tensor.shape[:2] or (tensor.dim() == 1 and len(tensor) % samples == 0) for tensor in found
    )


def _count(batch: Any) -> int | None:
    """As `samples_in`, of what does not have it in its first layer; None where it cannot be told."""
    if isinstance(batch, _ONE):
        return 1
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, list) and _has_one_per_sample(batch):
        return len(batch)
    for name in _SIZES:
        size = getattr(batch, name, None)
        if isinstance(size, int):
            return size
    fields = _fields(batch)
    if fields is not None:
        known = [
            count for field in fields if not isinstance(field, _ONE) and (count := _count(field)) is not None
        ]
        return known[0] if known else (len(fields) if isinstance(batch, tuple | list) else None)
    return len(batch) if hasattr(batch, "__len__") else None


def _has_one_per_sample(batch: list[Any]) -> bool:
    """Whether a list has an item for each sample, rather than fields of all samples: then the items are alike."""
    return all(isinstance(item, type(batch[0])) and _form(item) == _form(batch[0]) for item in batch) or any(
        isinstance(item, Tensor) and not item.dim() for item in batch
    )


def _form(item: Any) -> Any:
    if isinstance(item, Mapping):
        return list(item)
    if isinstance(item, tuple | list):
        return len(item) if isinstance(item, tuple) else None
    return item.dtype if isinstance(item, Tensor) else None


def _fields(batch: Any) -> list[Any] | None:
    """What a batch consists of; None where it cannot be looked into."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if hasattr(batch, "__dict__") and not hasattr(batch, "__len__"):
        return list(vars(batch).values())
    return None


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, as far as it can be looked into."""
    if isinstance(batch, Tensor):
        yield batch
    elif not isinstance(batch, (*_ONE, str, bytes)):
        for field in _fields(batch) or ():
            yield from tensors_in(field)


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every field changed; what has no fields stays as it is."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(field) for field in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(change(field) for field in batch)
    if isinstance(batch, Mapping):
        return {key: change(field) for key, field in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: change(getattr(batch, name)) for name in names})
    return batch


def empty_like(batch: Any) -> Any:
    """A batch of the same structure without samples."""
    if isinstance(batch, Tensor):
        return rows(batch, slice(0)) if batch.dim() else batch
    if isinstance(batch, list):
        return [empty_like(value) for value in batch if not isinstance(value, str)]
    return _rebuilt(batch, empty_like)


def emptied(batch: Any) -> Any:
    """As above; None where what a batch is does not allow it to have no samples."""
    try:
        empty = empty_like(batch)
        return None if samples_in(empty) else empty
    except (UsageError, TypeError, ValueError, AttributeError, RuntimeError):  # also of a layout without rows
        return None


def has_rows(tensor: Tensor) -> bool:
    """Whether some of its samples make a tensor, as those of a compressed or a nested one do not."""
    return tensor.dim() > 0 and tensor.layout in (torch.strided, torch.sparse_coo)


def rows(tensor: Tensor, where: slice) -> Tensor:
    """Some of the samples of a tensor, which may be sparse."""
    if tensor.layout == torch.strided:
        return tensor[where]
    return tensor.index_select(0, torch.arange(len(tensor), device=tensor.device)[where])


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; what is there already, and what is no tensor, stays as it is."""
    if hasattr(batch, "to"):  # a packed sequence leaves its lengths where they are
        return batch.to(device)
    return _rebuilt(batch, lambda field: moved(field, device))


def split(batch: Any, limit: int, count: int | None = None) -> list[Any]:
    """The batch in pieces of at most so many samples, as equal as can be; whole if it is of an unknown structure."""
    count = samples_in(batch) if count is None else count
    if count <= limit or not _can_split(batch, count):
        return [batch]
    pieces = -(-count // limit)
    edges = [count * piece // pieces for piece in range(pieces + 1)]
    return [_part(batch, slice(first, last)) for first, last in itertools.pairwise(edges)]


def _can_split(batch: Any, count: int) -> bool:
    """Whether each of its tensors has an entry for every sample: weights of classes, say, belong to all of them."""
    if isinstance(batch, Mapping):
        return all(_can_split(value, count) for value in batch.values())
    if type(batch) in (tuple, list):
        return all(_can_split(value, count) for value in batch)
    return isinstance(batch, Tensor) and has_rows(batch) and batch.shape[0] == count


def _part(batch: Any, where: slice) -> Any:
    if isinstance(batch, Mapping):
        return {key: _part(value, where) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_part(value, where) for value in batch)
    return rows(batch, where) if isinstance(batch, Tensor) else batch[where]


def parts_of(
    batches: Sequence[Any],
    limit: int | None,
    device: torch.device | None,
    count: Callable[[Any], int] = samples_in,
) -> tuple[list[tuple[Any, int]], int]:
    """What a step computes one after the other, and the samples in all: batches with their numbers of samples, those
    without any left out; cut into pieces of at most `limit` samples, and moved to the device, where these are given."""
    parts = []
    for batch in batches:
        samples = count(batch)
        pieces = split(batch, limit, samples) if limit else [batch]
        for piece in pieces:
            own = samples if piece is batch else samples_in(piece)
            if own:
                parts.append((piece if device is None else moved(piece, device), own))
    return parts, sum([samples for _, samples in parts])
