"""A numpy archive with the arrays x and y, and x_test and y_test if there is a split already.

The archive may be from others: what each array takes is known from its header, and is free, before any of it is read.
"""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.comm.transports.free_memory import available_bytes
from manyhands.data.pictures import PictureSettings, pictures
from manyhands.data.request import Request
from manyhands.data.sets import ArrayStore, Data, hold_out
from manyhands.data.transforms import Scale
from manyhands.errors import DataError
from manyhands.foreign.regular import open_regular

LARGEST_CLASSES = 1 << 24
_HELD_OUT = 0.1
_ARRAYS = ("x", "y", "x_test", "y_test")
_MOST_NAMED = 10
_PIECE_BYTES = 1 << 20
_COPIES = 3  # of the arrays: as they are stored, as float32, and divided into two parts

_Head = tuple[tuple[int, ...], bool, "np.dtype[Any]"]  # shape, whether the first number runs fastest, type


def load(request: Request, settings: PictureSettings) -> Data:
    """Bytes are pictures and are scaled to [0, 1]; other numbers are taken as they are."""
    path = request.path("npz:FILE")
    arrays = _read(path)
    x = _inputs(arrays["x"], path)
    y = _labels(arrays["y"], len(x), path)
    if "x_test" in arrays and "y_test" in arrays:
        x_test = _inputs(arrays["x_test"], path)
        y_test = _labels(arrays["y_test"], len(x_test), path)
        if x_test.shape[1:] != x.shape[1:] or x_test.dtype != x.dtype:
            raise DataError(
                f"{path}: x is {x.dtype} of shape {tuple(x.shape)}, but x_test is {x_test.dtype} "
                f"of shape {tuple(x_test.shape)}; only the first number may differ"
            )
    else:
        train, test = hold_out(y, max(1, round(_HELD_OUT * len(y))), request.seed)
        x, x_test, y, y_test = x[train], x[test], y[train], y[test]
    return pictures(
        request,
        train=ArrayStore(inputs=x, targets=y),
        test=ArrayStore(inputs=x_test, targets=y_test),
        shape=tuple(x.shape[1:]),
        classes=int(torch.cat([y, y_test]).max()) + 1,
        scale=Scale() if x.dtype == torch.uint8 else None,
        normalize=settings.normalize(request.text, tuple(x.shape[1:])),
    )


def _read(path: Path) -> dict[str, "np.ndarray[Any, Any]"]:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            known = set(archive.namelist())
            members = {name: archive.getinfo(f"{name}.npy") for name in _ARRAYS if f"{name}.npy" in known}
            heads = {name: _head(archive, member) for name, member in members.items()}
            _admit(path, sum(member.file_size for member in members.values()))
            found = {name: _array(archive, member, heads[name]) for name, member in members.items()}
            others = sorted(
                name.removesuffix(".npy") for name in known if name.removesuffix(".npy") not in found
            )
    except DataError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        reason = error.strerror if isinstance(error, OSError) else "it is damaged, or something else"
        raise DataError(f"{path} cannot be read as a numpy archive of plain arrays ({reason})") from None
    if missing := [name for name in ("x", "y") if name not in found]:
        there = [*found, *others]
        names = ", ".join(there[:_MOST_NAMED]) + ", …" * (len(there) > _MOST_NAMED)
        raise DataError(f"{path} has no array {missing[0]}; it has {names or 'none'}")
    return found


def _head(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Head:
    """What a member says of its array, if its size agrees."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("numpy packs in another way")  # and others can make a terabyte of a page
    with archive.open(member) as content:
        if np.lib.format.read_magic(content) != (1, 0):
            raise ValueError("its header is one of a structured array")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(content)
        size = math.prod(shape) * dtype.itemsize
        is_plain = (
            dtype.kind not in "OV"
            and dtype.itemsize
            and all(type(length) is int and length >= 0 for length in shape)
        )
        if not is_plain or content.tell() + size != member.file_size:
            raise ValueError(f"{dtype} of shape {shape} are not {member.file_size} bytes")
    return shape, is_fortran, dtype


def _admit(path: Path, size: int) -> None:
    """Refuse arrays for which there is no room."""
    if _COPIES * size > (free := available_bytes()):
        raise DataError(
            f"{path} has arrays of {size / 1e9:.1f} GB, which take {_COPIES * size / 1e9:.1f} GB while they are "
            f"divided, and {free / 1e9:.1f} GB of memory are free; `manyhands convert` it to LMDB on a larger machine"
        )


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, head: _Head) -> "np.ndarray[Any, Any]":
    shape, is_fortran, dtype = head
    with archive.open(member) as content:
        np.lib.format.read_magic(content)
        np.lib.format.read_array_header_1_0(content)
        array = np.empty(math.prod(shape), dtype)
        room = array.view(np.uint8)
        done = 0
        while piece := content.read(_PIECE_BYTES):  # to the end, where its checksum is compared
            room[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
        if done != len(room):
            raise EOFError
    return array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape)


def _inputs(array: "np.ndarray[Any, Any]", path: Path) -> Tensor:
    if array.dtype.kind not in "biuf" or array.ndim < 2 or 0 in array.shape[1:]:
        raise DataError(
            f"{path}: x is {array.dtype} of shape {array.shape}; expected numbers, samples × shape"
        )
    if len(array) < 2:
        raise DataError(f"{path}: x has {len(array)} samples; expected at least 2")
    inputs = torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.float32))
    if inputs.ndim == 3:
        return inputs.unsqueeze(1)
    if inputs.ndim == 4 and inputs.shape[3] in (1, 3) and inputs.shape[1] not in (1, 3):
        return inputs.permute(0, 3, 1, 2).contiguous()
    return inputs


def _labels(array: "np.ndarray[Any, Any]", samples: int, path: Path) -> Tensor:
    if array.dtype.kind not in "iu" or array.shape != (samples,) or array.min() < 0:
        raise DataError(
            f"{path}: y is {array.dtype} of shape {array.shape}; expected {samples} whole numbers from 0 up, "
            f"one for each sample of x"
        )
    if array.max() >= LARGEST_CLASSES:
        raise DataError(
            f"{path}: y has the label {array.max()}; at most {LARGEST_CLASSES:,} classes can be learned"
        )
    return torch.from_numpy(array.astype(np.int64))
