"""Whether a sample has the same number on all workers, as far as a data set shows it without being read.

The ledger deals numbers. Where every worker has drawn a split or an order of its own, the same number is another sample
on each: some would be seen twice, others never, and what is held out on one worker another one trains on.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from manyhands.engine.engine import Engine
from manyhands.errors import UsageError

_MOST = 4096  # items of a list that are looked at
_PLAIN = (str, int, float)


def sign(engine: Engine) -> float:
    """For other workers: what the script loops over; 0 where it cannot be told."""
    stream = engine.feeds.last.stream
    if stream is None or engine.world.size == 1:
        return 0.0
    if engine.told_data[0] is not stream:
        data = stream.data.dataset if isinstance(stream.data, DataLoader) else stream.data
        engine.told_data = stream, float(_order(data, 1) or 1)
    return float(engine.told_data[1])


def check(signs: Sequence[float]) -> None:
    """By rank; refuse where two workers differ."""
    first = next((rank for rank, one in enumerate(signs) if one), 0)
    for rank, one in enumerate(signs):
        if one and one != signs[first]:
            raise UsageError(
                f"workers {first} and {rank} have different samples, or the same in another order, in the data set of "
                "session.batches, which deals them by number; random_split, shuffle and train_test_split draw other "
                "numbers on each worker, so give them a seed (generator=torch.Generator().manual_seed(0), seed=0), or "
                "call them before mh.session; if the worker has chosen its own part, leave that to session.batches"
            )


def _order(data: Any, before: int) -> int:
    found = zlib.crc32(repr(len(data)).encode() if hasattr(data, "__len__") else b"", before)
    if isinstance(data, Subset):
        return _order(data.dataset, _numbers(data.indices, found))
    if isinstance(data, ConcatDataset):
        for one in data.datasets:
            found = _order(one, found)
        return found
    rows: Any = getattr(data, "_indices", None)  # of Hugging Face, where it was shuffled, split or filtered
    if hasattr(rows, "column") and hasattr(data, "_fingerprint"):
        return _numbers(rows.column(0).to_numpy(), found)
    if isinstance(data, (list, tuple)) and all(isinstance(one, _PLAIN) for one in data[:_MOST]):
        return zlib.crc32(repr(data[:_MOST]).encode(), found)
    return found


def _numbers(indices: Any, before: int) -> int:
    try:
        numbers = indices.numpy() if isinstance(indices, torch.Tensor) else numpy.asarray(indices)
        return zlib.crc32(numpy.ascontiguousarray(numbers, dtype=numpy.int64).data, before)
    except (TypeError, ValueError):  # something else than numbers
        return before
