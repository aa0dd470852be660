"""Folders of pictures: DIR/class/picture, or DIR/train/class/picture with DIR/test or DIR/val beside it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from manyhands.data.pictures import PictureSettings, pictures
from manyhands.data.request import Request
from manyhands.data.sets import Data, hold_out
from manyhands.data.transforms import Scale
from manyhands.errors import DataError
from manyhands.foreign.regular import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow goes by the content, and would start another program for PostScript that is called `.png`."""
_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
_LARGEST_DEFAULT_SIZE = 224
_HELD_OUT = 0.1
_TESTS = ("test", "val", "valid", "validation")  # the first that is there is the test part


@dataclass(frozen=True, kw_only=True)
class FolderStore:
    """Pictures in files, decoded when they are read: shorter side scaled to `size`, middle square cut out."""

    files: tuple[Path, ...]
    labels: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images = torch.empty((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        for row, index in enumerate(indices.tolist()):
            images[row] = self._decoded(self.files[index])
        return images, self.labels[indices]

    def _decoded(self, path: Path) -> Tensor:
        with _opened(path) as image:
            return fitted(image, channels=3, height=self.size, width=self.size)


def fitted(image: "Picture", *, channels: int, height: int, width: int) -> Tensor:
    """A picture as bytes [channels, height, width]: scaled until it covers them, the middle cut out."""
    from PIL import Image, ImageOps  # here: every session loads this module, and few load pictures

    mode = "L" if channels == 1 else "RGB"
    # JPEGs can be decoded at a fraction of their size, which is most of the work saved.
    image.draft(mode, (width, height))
    found = np.array(ImageOps.fit(image.convert(mode), (width, height), Image.Resampling.BILINEAR))
    return torch.from_numpy(found).view(height, width, channels).permute(2, 0, 1)


def refuse_large(image: "Picture") -> None:
    """Refuse a picture by the size that its head tells, before anything of it is decoded."""
    from PIL import Image

    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise ValueError(f"{image.width:,} × {image.height:,} pixels; at most {most:,} are decoded")


def load(request: Request, settings: PictureSettings) -> Data:
    """Every subfolder is a class, below `train` if there is one; without a test folder a seeded tenth is held out."""
    root = request.path("images:DIR")
    if not os.path.isdir(root):
        raise DataError(f"{root} is not a folder; images:DIR wants DIR/class/picture.png")
    source, tested, note = _split(root)
    classes = _classes(source)
    if tested and (extra := [name for name in _classes(tested) if name not in classes]):
        raise DataError(f"{tested} has the classes {', '.join(extra)} that {source} does not have")
    files, labels = _listed(source, classes)
    size = request.size or _default_size(files[0])
    if tested:
        test_files, test_labels = _listed(tested, classes)
    else:
        train, test = hold_out(labels, max(1, round(_HELD_OUT * len(files))), request.seed)
        test_files, test_labels = [files[index] for index in test.tolist()], labels[test]
        files, labels = [files[index] for index in train.tolist()], labels[train]
    return pictures(
        request,
        train=FolderStore(files=tuple(files), labels=labels, size=size),
        test=FolderStore(files=tuple(test_files), labels=test_labels, size=size),
        shape=(3, size, size),
        classes=len(classes),
        scale=Scale(),
        normalize=settings.normalize(request.text, (3, size, size)),
        note=note,
        class_names=tuple(classes),
    )


def _split(root: Path) -> tuple[Path, Path | None, str]:
    """The folder to train on, the one to test with if there is one, and what to tell the user.

    `train` is a class like any other unless a test folder is beside it, or it is alone and has classes in it.
    """
    train, names = root / "train", _classes(root)
    tests = [name for name in _TESTS if name in names]
    if "train" in names and tests:
        others = [name for name in names if name not in ("train", tests[0])]
        unused = f"; {', '.join(others)} unused" if others else ""
        return train, root / tests[0], f"{root}: training on train, testing with {tests[0]}{unused}"
    if names == ["train"] and _classes(train):
        return train, None, f"{root}: training on train, a tenth of it held out for testing"
    return root, None, ""


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _listed(folder: Path, classes: list[str]) -> tuple[list[Path], Tensor]:
    files, labels = [], []
    for label, name in enumerate(classes):
        # Sorted, because the order in which a disk lists files differs from host to host.
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in _ENDINGS)
        files.extend(found)
        labels.extend([label] * len(found))
    if len(files) < 2:
        raise DataError(
            f"{folder} holds {len(files)} pictures in {len(classes)} class folders; expected at least 2"
        )
    return files, torch.tensor(labels)


def _default_size(path: Path) -> int:
    with _opened(path) as image:
        return min(*image.size, _LARGEST_DEFAULT_SIZE)


@contextmanager
def _opened(path: Path) -> "Iterator[Picture]":
    """A picture whose size is known and small enough, before anything of it is decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            refuse_large(image)
            yield image
    except UnidentifiedImageError:
        raise _broken(path, f"it is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # a damaged picture can fail in any way
        reason = error.strerror if isinstance(error, OSError) else None
        raise _broken(path, reason or str(error) or type(error).__name__) from None


def _broken(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is not a picture that can be read ({reason}); repair or remove it")
