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
import threading
import weakref
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from manyhands.data.files import replacing
from manyhands.data.loading import gather
from manyhands.data.pictures import pictures
from manyhands.data.request import NoSettings, Progress, Request
from manyhands.data.sets import Data, Samples, StoredSet
from manyhands.data.transforms import Normalize, Resize, Scale
from manyhands.errors import DataError, UsageError

_FORMAT = "manyhands-1"
_CHUNK = 256
_PAGE_BYTES = 4096
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
    meta = _meta(path)
    data = pictures(
        dataclasses.replace(request, size=request.size or meta.size),
        train=LmdbStore(path, "train", meta),
        test=LmdbStore(path, "test", meta),
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

    def __init__(self, path: Path, part: str, meta: Meta) -> None:
        self._path = path
        self._part = part
        self._meta = meta
        self._file: _File | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def __len__(self) -> int:
        return self._meta.samples[self._part]

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        meta = self._meta
        input_type, target_type = _TYPES[meta.input_type], _TYPES[meta.target_type]
        input_bytes = prod(meta.input_shape) * input_type.itemsize
        record_bytes = input_bytes + prod(meta.target_shape) * target_type.itemsize
        # A forked child inherits this object but must not use its parent's file.
        if self._file is None or self._file.process != os.getpid():
            self._file = _File.of_this_process(self._path)
        records = bytearray()
        with self._file.environment.begin() as transaction:
            for index in indices.tolist():
                record = transaction.get(_key(self._part, index), b"")
                if len(record) != record_bytes:
                    raise DataError(
                        f"{self._path} is damaged: {self._part} sample {index} has {len(record)} bytes "
                        f"instead of {record_bytes}; write the file again"
                    )
                records += record
        rows = torch.frombuffer(records, dtype=torch.uint8).view(len(indices), record_bytes)
        inputs = rows[:, :input_bytes].contiguous().view(input_type)
        targets = rows[:, input_bytes:].contiguous().view(target_type)
        return inputs.view(-1, *meta.input_shape), targets.view(-1, *meta.target_shape)


class _File:
    """An LMDB file opened by this process; LMDB does not allow the same file to be opened twice."""

    _all: ClassVar["weakref.WeakValueDictionary[Path, _File]"] = weakref.WeakValueDictionary()
    _lock = threading.Lock()

    def __init__(self, path: Path) -> None:
        self.process = os.getpid()
        try:
            self.environment = _library().open(
                str(path), subdir=False, readonly=True, lock=False, readahead=False
            )
        except Exception as error:  # the module is optional, and with it the name of its errors
            raise DataError(f"{path} cannot be read as an LMDB file ({error})") from None
        weakref.finalize(self, self.environment.close)

    @classmethod
    def of_this_process(cls, path: Path) -> "_File":
        path = path.resolve()
        with cls._lock:
            file = cls._all.get(path)
            if file is None:
                file = cls._all[path] = cls(path)
            return file

    @classmethod
    def forget_those_of_the_parent(cls) -> None:
        """LMDB must not use a file across a fork, and counts it as open until it is closed here too."""
        for file in list(cls._all.values()):
            file.environment.close()
        cls._all.clear()
        cls._lock = threading.Lock()


os.register_at_fork(after_in_child=_File.forget_those_of_the_parent)


def _meta(path: Path) -> Meta:
    if not path.is_file():
        raise DataError(f"{path} is not a file; lmdb:FILE wants a file written by manyhands")
    file = _File.of_this_process(path)
    with file.environment.begin() as transaction:
        content = transaction.get(b"meta", b"")
    try:
        meta = msgspec.json.decode(content, type=Meta)
        if meta.format != _FORMAT or not {meta.input_type, meta.target_type} <= _TYPES.keys():
            raise ValueError(f"format {meta.format} of {meta.input_type} and {meta.target_type}")
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataError(f"{path} is an LMDB file, but not one written by manyhands ({error})") from None
    return meta


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
