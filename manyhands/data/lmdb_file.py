"""Samples in one LMDB file, readable by many processes at once (the input of Caffe, with records of our own).

The file holds
  `meta`               JSON: the fields of `Meta` below
  `train/0000000000`   one sample: the bytes of the input, then the bytes of the target
  `test/0000000000`    the same for the test part
All samples have the same shape; numbers are little-endian. Pictures are kept as they were stored (one byte
per value), and `meta` says how they are scaled and normalised when they are read.
"""

import dataclasses
import os
from math import isfinite, prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.data.files import replacing
from manyhands.data.lmdb_records import RecordFile
from manyhands.data.loading import gather
from manyhands.data.npz import LARGEST_CLASSES
from manyhands.data.pictures import pictures
from manyhands.data.request import NoSettings, Progress, Request
from manyhands.data.sets import Data, Samples, StoredSet
from manyhands.data.transforms import Normalize, Resize, Scale
from manyhands.errors import DataError, UsageError

_FORMAT = "manyhands-1"
_CHUNK = 256
_PAGE_BYTES = 4096
_LARGEST_SIZE = 4096  # to which pictures are scaled as they are read
_PARTS = ("train", "test")
_TASKS = ("classify", "next-token")
_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
}


class Meta(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the records are, and what is done with them."""

    format: str
    samples: dict[str, int]
    input_type: str
    input_shape: tuple[int, ...]
    target_type: str
    target_shape: tuple[int, ...]
    classes: int
    task: str
    full: int | None = None
    size: int | None = None
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None


def to_lmdb(data: Data, path: Path, progress: Progress | None = None) -> None:
    """Write both parts of a data set into one LMDB file."""
    lmdb = _library()
    inputs, targets = _stored(data.train, torch.arange(1))
    meta = Meta(
        format=_FORMAT,
        samples={"train": len(data.train), "test": len(data.test)},
        input_type=_type_name(inputs),
        input_shape=tuple(inputs.shape[1:]),
        target_type=_type_name(targets),
        target_shape=tuple(targets.shape[1:]),
        classes=data.classes,
        task=data.task,
        **_transforms(data.test),
    )
    try:
        _check(meta)
    except ValueError as error:
        raise DataError(f"an LMDB file of ours cannot hold {error}") from None
    total = sum(meta.samples.values())
    # Large records take whole pages; the rest is for the tree above them. The file grows only when needed.
    room_bytes = 2 * total * (inputs.nbytes + targets.nbytes + _PAGE_BYTES) + (64 << 20)
    with (
        replacing(path) as beside,
        lmdb.open(str(beside), subdir=False, lock=False, sync=False, map_size=room_bytes) as environment,
    ):
        with environment.begin(write=True) as transaction:
            transaction.put(b"meta", msgspec.json.encode(meta))
        done = 0
        for part, samples in (("train", data.train), ("test", data.test)):
            for indices in torch.split(torch.arange(len(samples)), _CHUNK):
                _write(environment, part, indices, *_stored(samples, indices))
                done += len(indices)
                if progress:
                    progress(str(path), done, total)
        environment.sync(True)


def load(request: Request, settings: NoSettings) -> Data:
    """Both parts, scaled and normalised as they were when the file was written."""
    path = request.path("lmdb:FILE")
    meta, file = _opened(path)
    data = pictures(
        dataclasses.replace(request, size=request.size or meta.size),
        train=LmdbStore(path, "train", meta, file),
        test=LmdbStore(path, "test", meta, file),
        shape=meta.input_shape,
        classes=meta.classes,
        scale=Scale(full=meta.full) if meta.full else None,
        normalize=Normalize(mean=meta.mean, deviation=meta.deviation)
        if meta.mean and meta.deviation
        else None,
    )
    return dataclasses.replace(data, task=meta.task)


class LmdbStore:
    """One part of an LMDB file, opened by each process when it first reads."""

    def __init__(self, path: Path, part: str, meta: Meta, file: RecordFile) -> None:
        self._path = path
        self._part = part
        self._meta = meta
        self._file: RecordFile | None = file

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def __len__(self) -> int:
        return self._meta.samples[self._part]

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        meta = self._meta
        input_type, target_type = _TYPES[meta.input_type], _TYPES[meta.target_type]
        input_bytes = prod(meta.input_shape) * input_type.itemsize
        record_bytes = input_bytes + prod(meta.target_shape) * target_type.itemsize
        if self._file is None:
            self._file = RecordFile(self._path, _PARTS)
        starts, lengths = self._file.places[self._part]
        records = bytearray()
        for index in indices.tolist():
            if lengths[index] != record_bytes:
                raise DataError(
                    f"{self._path} is damaged: {self._part} sample {index} has {lengths[index]} bytes "
                    f"instead of {record_bytes}; write the file again"
                )
            try:
                records += self._file.read(int(starts[index]), record_bytes)
            except (OSError, ValueError) as error:
                raise DataError(f"{self._path} is damaged: {error}; write the file again") from None
        rows = torch.frombuffer(records, dtype=torch.uint8).view(len(indices), record_bytes)
        inputs = rows[:, :input_bytes].contiguous().view(input_type)
        targets = rows[:, input_bytes:].contiguous().view(target_type)
        return inputs.view(-1, *meta.input_shape), targets.view(-1, *meta.target_shape)


def _opened(path: Path) -> tuple[Meta, RecordFile]:
    if not os.path.isfile(path):
        raise DataError(f"{path} is not a file; lmdb:FILE wants a file written by manyhands")
    file = RecordFile(path, _PARTS)
    try:
        meta = msgspec.json.decode(file.meta, type=Meta)
        _check(meta)
        for part in _PARTS:
            if meta.samples[part] != (found := len(file.places[part][0])):
                raise ValueError(f"it says {meta.samples[part]} {part} samples and has {found}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is an LMDB file, but not one written by manyhands ({error})") from None
    return meta, file


def _check(meta: Meta) -> None:
    """Refuse what no data set has, before anything is sized by it."""
    wrong = None
    channels = meta.input_shape[0] if meta.input_shape else 0
    numbers = [*(meta.mean or ()), *(meta.deviation or ())]
    if meta.format != _FORMAT or not {meta.input_type, meta.target_type} <= _TYPES.keys():
        wrong = f"format {meta.format} of {meta.input_type} and {meta.target_type}"
    elif min((1, *meta.input_shape, *meta.target_shape)) < 1 or len(meta.input_shape) > 8:
        wrong = f"samples of shape {meta.input_shape} and {meta.target_shape}"
    elif meta.samples.keys() != set(_PARTS) or meta.task not in _TASKS:
        wrong = f"the parts {', '.join(meta.samples)} and the task {meta.task}"
    elif not 1 <= meta.classes <= LARGEST_CLASSES:
        wrong = f"{meta.classes} classes, and not 1 to {LARGEST_CLASSES:,}"
    elif not 1 <= (1 if meta.size is None else meta.size) <= _LARGEST_SIZE or (meta.full or 1) < 1:
        wrong = f"pictures of size {meta.size} on a scale to {meta.full}; sizes end at {_LARGEST_SIZE}"
    elif not all(map(isfinite, numbers)) or any(
        values is not None and len(values) != channels for values in (meta.mean, meta.deviation)
    ):
        wrong = f"a mean and deviation that are not numbers for {channels} channels"
    if wrong:
        raise ValueError(wrong)


def _write(environment: Any, part: str, indices: Tensor, inputs: Tensor, targets: Tensor) -> None:
    with environment.begin(write=True) as transaction:
        for index, sample, target in zip(indices.tolist(), inputs.numpy(), targets.numpy(), strict=True):
            transaction.put(_key(part, index), sample.tobytes() + target.tobytes())


def _key(part: str, index: int) -> bytes:
    return f"{part}/{index:010d}".encode()


def _stored(samples: Samples, indices: Tensor) -> tuple[Tensor, Tensor]:
    pair = (
        samples.store.read(indices) if isinstance(samples, StoredSet) else gather(samples, indices, epoch=0)
    )
    if not (
        isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(half, Tensor) for half in pair)
    ):
        raise DataError("only data sets of (input, target) tensors can be written to an LMDB file")
    return pair[0], pair[1]


def _type_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise DataError(f"an LMDB file cannot hold {name}; it can hold {', '.join(_TYPES)}")
    return name


def _transforms(samples: Samples) -> dict[str, Any]:
    """The fixed transforms of a data set; random ones are asked for anew by each run."""
    found: dict[str, Any] = {}
    for step in samples.transforms if isinstance(samples, StoredSet) else ():
        if isinstance(step, Scale | Resize | Normalize):
            found |= dataclasses.asdict(step)
    return found


def _library() -> Any:
    try:
        import lmdb
    except ImportError:
        raise UsageError(
            "LMDB files need the package lmdb; install it with `pip install 'manyhands[lmdb]'`"
        ) from None
    return lmdb
