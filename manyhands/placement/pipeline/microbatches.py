"""A batch in microbatches."""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from manyhands.data.structure import has_rows, rows


def microbatches(batch: Any, samples: int, count: int) -> list[tuple[Any, int]]:
    """About equal parts of a batch of any structure, in order, each with its samples; no part is empty."""
    count = min(count, samples)
    edges = [samples * index // count for index in range(count + 1)]
    return [(_part(batch, start, stop, samples), stop - start) for start, stop in itertools.pairwise(edges)]


def copied(batch: Any) -> Any:
    """The batch with tensors of its own, which code may change."""
    return tree_map_only(Tensor, Tensor.clone, batch)


def _part(batch: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(batch, Tensor):
        return rows(batch, slice(start, stop)) if has_rows(batch) and len(batch) == samples else batch
    if isinstance(batch, Mapping):
        return {key: _part(value, start, stop, samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_part(value, start, stop, samples) for value in batch))
    if isinstance(batch, tuple):
        return tuple(_part(value, start, stop, samples) for value in batch)
    if isinstance(batch, list):
        if len(batch) == samples and not any(isinstance(value, (Tensor, Mapping)) for value in batch):
            return batch[start:stop]
        return [_part(value, start, stop, samples) for value in batch]
    return batch
