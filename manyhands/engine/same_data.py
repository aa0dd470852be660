"""Workers that are given the same batches: noticed in the first steps, and said once.

Each of the first steps comes with a digest of a few numbers of its batch. A loop over a plain DataLoader gives every
worker all of its data, in another order where it shuffles; so the first step outside of the session's loops also has a
digest of the first sample of such a loader's data set.
"""

import gc
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from manyhands.data.loader_stream import is_of_session
from manyhands.data.structure import tensors_in
from manyhands.engine.random_state import capture, restore

STEPS = 3
"""With equal batches, after which two workers are said to have the same."""
_PATIENCE = 50  # steps
_NUMBERS = 16  # of each tensor
_TENSORS = 4  # of each batch
_WAY_OUT = "loop over session.batches(loader), which gives every worker samples of its own"

Signs = tuple[float, float]  # digests of a batch, and of the data of a plain loader; 0: none


class Twins:
    """What this worker has seen of the first steps of all workers."""

    def __init__(self) -> None:
        self.signs: Signs = (0.0, 0.0)
        self.is_over = False
        self.copies = 1  # workers that compute the same samples
        self.step = 0  # of this worker
        self._seen = 0
        self._pairs: set[tuple[int, int]] | None = None

    def note(self, batches: Sequence[Any], *, in_loop: bool) -> str:
        """A step of this worker begins; returns a warning that needs no other worker's word."""
        self.step += 1
        self.is_over |= self.step > _PATIENCE
        self.signs = (digest(batches), 0.0)
        if self.step > 1 or in_loop:
            return ""
        loader, is_divided = _plain_loader()
        if is_divided:
            return (
                "this loop takes its batches from a DataLoader with a DistributedSampler, whose parts are fixed: what "
                f"belongs to a worker that dies is not used again; take the sampler out, and {_WAY_OUT}"
            )
        self.signs = (self.signs[0], digest_of_data(loader))
        return ""

    def see(self, rows: Sequence[Signs]) -> str:
        """What all workers with data of their own brought to a step; returns a warning, if it shows something."""
        if whole := _pairs([row[1] for row in rows]):
            self.is_over = True
            return _divided_by_none(self._workers(whole))
        if not any(row[0] for row in rows):
            return ""
        same = _pairs([row[0] for row in rows])
        self._pairs = same if self._pairs is None else self._pairs & same
        self._seen += 1
        self.is_over = not self._pairs or self._seen == STEPS
        return _same_batches(self._workers(self._pairs)) if self._pairs and self.is_over else ""

    def look(self, rows: Sequence[Sequence[int]]) -> str:
        """The same where workers do not wait for each other: the signs of each, as far as it has come."""
        if whole := _pairs([row[STEPS] for row in rows]):
            self.is_over = True
            return _divided_by_none(self._workers(whole))
        same = [_pairs([row[step] for row in rows]) for step in range(STEPS)]
        found = set.intersection(*same)
        self.is_over = bool(found)
        return _same_batches(self._workers(found)) if found else ""

    def _workers(self, pairs: set[tuple[int, int]]) -> str:
        """By name, the first of those that compute the same samples."""
        names = sorted({feed * self.copies for pair in pairs for feed in pair})
        return f"workers {', '.join(map(str, names[:-1]))} and {names[-1]}"


def _divided_by_none(workers: str) -> str:
    return (
        f"{workers} each go through all of the data of a DataLoader, so that an epoch is as many epochs as there "
        f"are workers; {_WAY_OUT}"
    )


def _same_batches(workers: str) -> str:
    return (
        f"{workers} were given the same batches in the first {STEPS} steps, so they compute the same gradients; "
        f"{_WAY_OUT}, and draw random batches after mh.session, without same_random"
    )


def digest(batches: Sequence[Any]) -> float:
    """Of a few numbers of the first tensors; 0 where all of these are the same, as in made-up data."""
    found = []
    for batch in batches[:1]:
        for tensor, _ in zip(tensors_in(batch), range(_TENSORS), strict=False):
            found.append((tuple(tensor.shape), _some(tensor)))
    if all(len(set(numbers)) < 2 for _, numbers in found):
        return 0.0
    return float(zlib.crc32(repr(found).encode()) or 1)


def _some(tensor: Tensor) -> list[float]:
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_meta:
        return []
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1) if tensor.dim() else tensor
    flat = flat.view(-1)
    found: list[float] = flat[:: max(1, len(flat) // _NUMBERS)][:_NUMBERS].tolist()
    return found


def _pairs(signs: Sequence[float]) -> set[tuple[int, int]]:
    """Workers with the same sign."""
    count = len(signs)
    return {(a, b) for a in range(count) for b in range(a + 1, count) if signs[a] and signs[a] == signs[b]}


def _plain_loader() -> tuple[Any, bool]:
    """A DataLoader that the script is in a loop over by itself, and whether its sampler divides the data."""
    objects = gc.get_referrers(_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
    # By type: some objects answer the question for their class with a warning.
    loops = [one for one in objects if issubclass(type(one), _BaseDataLoaderIter)]
    found = [one for one in loops if not is_of_session(one)]
    for one in found:
        if one._dataset_kind != _DatasetKind.Map:
            continue
        sampler = getattr(one._index_sampler, "sampler", one._index_sampler)
        return one, isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    return None, False


def digest_of_data(loader: Any) -> float:
    """Of the length and the first sample of the data that a loader goes through, whatever its transforms draw."""
    if loader is None:
        return 0.0
    before = capture()
    try:
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        data = loader._dataset
        sample = data[0]
        return float(zlib.crc32(repr((len(data), digest([sample]), _plain(sample))).encode()) or 1)
    except Exception:  # it was only a look
        return 0.0
    finally:
        restore(before)


def _plain(sample: Any) -> str:
    return "" if any(True for _ in tensors_in(sample)) else repr(sample)[:1000]
