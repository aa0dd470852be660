"""A numpy archive with the arrays x and y, and x_test and y_test if there is a split already."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.data.pictures import PictureSettings, pictures
from manyhands.data.request import Request
from manyhands.data.sets import ArrayStore, Data, hold_out
from manyhands.data.transforms import Scale
from manyhands.errors import DataError

_HELD_OUT = 0.1


def load(request: Request, settings: PictureSettings) -> Data:
    """Bytes are pictures and are scaled to [0, 1]; other numbers are taken as they are."""
    path = request.path("npz:FILE")
    arrays = _read(path)
    if missing := [name for name in ("x", "y") if name not in arrays]:
        raise DataError(f"{path} has no array {missing[0]}; it has {', '.join(arrays) or 'none'}")
    x, y = _inputs(arrays["x"], path), _labels(arrays["y"], len(arrays["x"]), path)
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
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged, or something else"
        raise DataError(f"{path} cannot be read as a numpy archive of plain arrays ({reason})") from None


def _inputs(array: "np.ndarray[Any, Any]", path: Path) -> Tensor:
    if array.dtype.kind not in "biuf" or array.ndim < 2:
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
    return torch.from_numpy(array.astype(np.int64))
