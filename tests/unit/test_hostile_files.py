"""Whatever is in a file: it loads, or it is refused with an error of ours, and takes no more memory than it may."""

import base64
import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import manyhands as mh
from manyhands import checkpoint
from manyhands.checkpoint import publish, record_file, tensor_file
from manyhands.cluster.coordinator.control import Invitation
from manyhands.cluster.launcher import invitation
from manyhands.data import idx, load, npz, to_lmdb
from manyhands.data.ledger import DrawnOrder
from manyhands.errors import CheckpointError, DataError, ManyhandsError, UsageError
from manyhands.foreign import archive, plain_pickle
from manyhands.job import plan as plans
from manyhands.launching.run import forget_records, make_directory, new_run, read_summary
from manyhands.telemetry import recorder
from manyhands.telemetry.digest import Digest
from manyhands.telemetry.read import Tail, read
from manyhands.telemetry.tensorboard import export
from tests.hostile import endure, mutants, odd_values
from tests.unit.test_data_published import binary_files, python_files, write_cifar, write_files, write_tar

MIB = 1 << 20


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """What Python, numpy and zlib take meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def first_batches(text: str, **options: Any) -> None:
    data = load(text, **options)
    for part in (data.train, data.test):
        part.batch(torch.arange(len(part)), 0)  # type: ignore[attr-defined]


# --- npz


def npz_bytes(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    valid = npz_bytes(x=np.arange(80, dtype=np.uint8).reshape(20, 2, 2), y=np.arange(20) % 3)
    found = endure(mutants(valid), path.write_bytes, lambda: first_batches(f"npz:{path}"))
    assert min(found.values()) > 0


def write_member(
    path: Path, head: str, content: bytes, way: int = zipfile.ZIP_DEFLATED, version: int = 1
) -> None:
    with zipfile.ZipFile(path, "w", way) as file:
        packed = head.encode() + b"\n"
        length = struct.pack("<H" if version == 1 else "<I", len(packed))
        file.writestr("x.npy", b"\x93NUMPY" + bytes([version, 0]) + length + packed + content)
        labels = io.BytesIO()
        np.lib.format.write_array(labels, np.zeros(2, int))
        file.writestr("y.npy", labels.getvalue())


def says(shape: str, kind: str = "|u1") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (says("(2, 1099511627776)"), {}),
        (says("(2, 9223372036854775807, 8)"), {}),
        (says("(-2, -4)"), {}),
        (says("(True, 8)"), {}),
        (says("(2, 4)", "|O"), {}),
        (says("(2, 4)", "|V0"), {}),
        (says("(2, 4)"), {"way": zipfile.ZIP_LZMA}),
        (says("(2, 4)"), {"version": 2}),
        ("(" * 9000, {}),
    ],
)
def test_npz_whose_header_lies(tmp_path: Path, head: str, more: dict[str, int]) -> None:
    write_member(tmp_path / "a.npz", head, bytes(8), **more)
    with peak_below(8 * MIB), pytest.raises(DataError, match="cannot be read as a numpy archive"):
        load(f"npz:{tmp_path / 'a.npz'}")


def test_npz_that_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred megabytes of zeros in a hundred kilobytes."""
    write_member(tmp_path / "a.npz", says("(2, 50000000)"), bytes(100_000_000))
    monkeypatch.setattr(npz, "available_bytes", lambda: 200_000_000)
    with (
        peak_below(MIB),
        pytest.raises(DataError, match=r"arrays of 0.1 GB.*0.3 GB.* 0.2 GB of memory are free"),
    ):
        load(f"npz:{tmp_path / 'a.npz'}")


def test_npz_of_too_many_classes(tmp_path: Path) -> None:
    for label in (1 << 40, (1 << 64) - 1):
        (tmp_path / "a.npz").write_bytes(npz_bytes(x=np.eye(2), y=np.array([0, label], dtype=np.uint64)))
        with pytest.raises(DataError, match="at most 16,777,216 classes"):
            load(f"npz:{tmp_path / 'a.npz'}")


# --- pictures


def picture_bytes(form: str) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, form)
    return content.getvalue()


def folder_of(tmp_path: Path, content: bytes) -> Path:
    for number in range(3):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number}.png").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP"])
def test_pictures(tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]) -> None:
    valid = picture_bytes(form)
    folder_of(tmp_path, valid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow has many about damaged files
        endure(
            mutants(valid),
            (tmp_path / "a" / "0.png").write_bytes,
            lambda: first_batches(f"images:{tmp_path}"),
        )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (20_000, 20_000), (1 << 31, 1 << 31)])
def test_a_giant_picture_is_refused_before_it_is_decoded(tmp_path: Path, width: int, height: int) -> None:
    content = bytearray(picture_bytes("BMP"))
    content[18:26] = struct.pack("<ii", width & 0x7FFFFFFF, height & 0x7FFFFFFF)
    giant = folder_of(tmp_path, picture_bytes("PNG")) / "a" / "1.png"
    giant.write_bytes(content)
    for size in (8, None):
        with peak_below(MIB), pytest.raises(DataError, match=r"1.png is not a picture that can be read"):
            first_batches(f"images:{tmp_path}", size=size)
        giant.rename(tmp_path / "a" / "0.png")  # whose size is the default
        giant = tmp_path / "a" / "0.png"
        (tmp_path / "a" / "1.png").write_bytes(picture_bytes("PNG"))
        if size == 8:
            with peak_below(MIB), pytest.raises(DataError, match=r"0.png is not a picture"):
                first_batches(f"images:{tmp_path}")
            break


def test_what_is_called_a_picture_starts_no_other_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("started"))
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    folder_of(tmp_path, page)
    with pytest.raises(DataError, match="it is none of BMP, GIF"):
        first_batches(f"images:{tmp_path}", size=8)


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(folder_of(tmp_path, picture_bytes("PNG")) / "a" / "3.png")
    with pytest.raises(DataError, match="it is no regular file"):
        first_batches(f"images:{tmp_path}", size=8)


# --- LMDB


@pytest.mark.parametrize("form", ["synthetic:1x2x2:3,samples=150", "synthetic:3x32x32:3,samples=6"])
def test_lmdb(tmp_path: Path, form: str) -> None:
    """Short records, which lie in the leaves of the tree, and long ones in pages of their own."""
    pytest.importorskip("lmdb")
    path = tmp_path / "a.lmdb"
    to_lmdb(load(form), path)
    valid = path.read_bytes()
    found = endure(mutants(valid), path.write_bytes, lambda: first_batches(f"lmdb:{path}"))
    assert found["loaded"] > 0
    heads = mutants(valid[:160] + valid[4096:4256] + valid[-4096:])  # where each byte counts

    def put(head: bytes) -> None:
        path.write_bytes(head[:160] + valid[160:4096] + head[160:320] + valid[4256:-4096] + head[320:])

    endure(heads, put, lambda: first_batches(f"lmdb:{path}"))


def test_lmdb_that_says_what_no_data_set_has(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    path = tmp_path / "a.lmdb"
    to_lmdb(load("synthetic:3x4x4:3,samples=6"), path)
    with lmdb.open(str(path), subdir=False, lock=False) as file, file.begin() as transaction:
        valid = json.loads(transaction.get(b"meta"))

    def put(meta: Any) -> None:
        with lmdb.open(str(path), subdir=False, lock=False) as file, file.begin(write=True) as transaction:
            transaction.put(b"meta", json.dumps(meta).encode())

    endure(
        odd_values(valid | {"mean": [0.5] * 3, "deviation": [1] * 3}),
        put,
        lambda: first_batches(f"lmdb:{path}"),
    )
    for wrong in ({"samples": {"train": 1 << 60, "test": 1}}, {"size": 1 << 20}, {"classes": 1 << 40}):
        put(valid | wrong)
        with pytest.raises(DataError, match="not one written by manyhands"):
            load(f"lmdb:{path}")


# --- MNIST, CIFAR-10, text


def idx_files(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        pictures = struct.pack(">BBBBIII", 0, 0, 8, 3, 6, 4, 4) + bytes(range(96))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pictures))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 6) + bytes(6))


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"])
def test_idx(tmp_path: Path, name: str) -> None:
    idx_files(tmp_path / "mnist")
    path = tmp_path / "mnist" / name
    endure(mutants(path.read_bytes()), path.write_bytes, lambda: first_batches("mnist", directory=tmp_path))


def test_idx_that_is_packed_well(tmp_path: Path) -> None:
    idx_files(tmp_path / "mnist")
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    endure(
        mutants(gzip.decompress(path.read_bytes())),
        lambda content: path.write_bytes(gzip.compress(content)),
        lambda: first_batches("mnist", directory=tmp_path),
    )


def test_idx_that_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idx_files(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBBIII", 0, 0, 8, 3, 6, 4, 4) + bytes(100_000_000)))
    with peak_below(8 * MIB), pytest.raises(DataError, match="announces 6×4×4 values but holds more than 96"):
        load("mnist", directory=tmp_path)
    path.write_bytes(gzip.compress(struct.pack(">BBBBIII", 0, 0, 8, 3, *[(1 << 32) - 1] * 3)))
    monkeypatch.setattr(idx, "available_bytes", lambda: 1 << 30)
    with peak_below(8 * MIB), pytest.raises(DataError, match=r"1.1 GB of memory are free"):
        load("mnist", directory=tmp_path)


@pytest.mark.parametrize("form", ["bin", "bin archive", "python", "python archive"])
def test_cifar10(tmp_path: Path, form: str) -> None:
    write_cifar(tmp_path, form)
    path = next(one for one in sorted(tmp_path.rglob("*")) if one.is_file())
    endure(mutants(path.read_bytes()), path.write_bytes, lambda: first_batches("cifar10", directory=tmp_path))


def test_headers_of_cifar10(tmp_path: Path) -> None:
    """Where a change is no longer one of a pixel."""
    content = python_files()["data_batch_1"]
    start = content.index(bytes(cifar_pixels := content[content.index(b"T") + 5 :][:64]))
    assert cifar_pixels
    folder = tmp_path / "cifar-10-batches-py"
    write_files(folder, python_files())
    heads = mutants(content[:start] + content[-200:])
    endure(
        (head[:start] + content[start:-200] + head[start:] for head in heads),
        (folder / "data_batch_1").write_bytes,
        lambda: first_batches("cifar10", directory=tmp_path),
    )


def deep_tuple() -> bytes:
    return b"}" + b"N" + b"\x85" * 100_000 + b"K\0s."


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02T\xff\xff\xff\x7f",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",
        b"\x80\x02cnumpy\nndarray\n(J\x00\x00\x00\x40tR.",  # an array of a gigabyte
        b"\x80\x02cnumpy\ndtype\nU\x02V8K\x00K\x01\x87R(K\x03U\x01|NNNK\x08K\x01K\x3ftb.",  # flags of a type
        deep_tuple(),
        b"\x80\x02K\x00Q.",
        b"\x82\x01.",
        b"cos\nsystem\n(U\x02lstR.",
    ],
)
def test_pickles_that_are_not_plain(content: bytes) -> None:
    with peak_below(64 * MIB), pytest.raises((ValueError, KeyError, IndexError)):
        plain_pickle.read(content)


def test_plain_pickles_are_read() -> None:
    value = {b"a": [1, -1, 300, 70_000, 1 << 40, 0.5, None, True, "é", b"x" * 300], b"b": (1, (2, 3), ())}
    for protocol in (3, 4, 5):
        assert plain_pickle.read(pickle.dumps(value, protocol)) == value
    with peak_below(MIB):
        assert (
            plain_pickle.read(b"\x80\x02Nr\xff\xff\xff\x7f.") is None
        )  # kept in a place of its own choosing


def test_archives_are_bounded_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    monkeypatch.setattr(archive, "LARGEST_MEMBER", 8 * MIB)
    monkeypatch.setattr(archive, "LARGEST_ARCHIVE", 16 * MIB)
    write_tar(path, {f"../../{name}": content for name, content in binary_files().items()})
    assert len(load("cifar10", directory=tmp_path).train) == 20
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    bomb = tarfile.TarInfo("data_batch_1.bin")
    long_header = tarfile.TarInfo("x")
    long_header.type, long_header.size = tarfile.XHDTYPE, 100_000_000
    link = tarfile.TarInfo("data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    for member, size in ((bomb, 9 * MIB), (long_header, 100_000_000), (link, 0), (bomb, 0)):
        member.size = size
        with gzip.open(path, "wb") as file:
            file.write(member.tobuf() + bytes(size + 1024))
        with (
            peak_below(64 * MIB),
            pytest.raises(DataError, match=r"MiB|at most 8,388,608|does not hold|whole records"),
        ):
            load("cifar10", directory=tmp_path)


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    endure(
        mutants(b"the cat sat on the mat. " * 40),
        path.write_bytes,
        lambda: first_batches(f"text:{path},length=4"),
    )
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "no\0name", "\ud800", "x" * 300):
        with pytest.raises(DataError):
            load(f"text:{tmp_path / name}")
        for form in ("npz", "lmdb", "images"):
            with pytest.raises(DataError):
                load(f"{form}:{tmp_path / name}")


# --- specs and plans

SPEC = b"""
[model]
name = "mlp"
hidden = [16, 8]
[data]
name = "digits"
[strategy]
name = "all-reduce"
[cluster]
workers = 2
hosts = "2@10.0.0.1"
[train]
epochs = 3
seed = 5
clip_norm = 0.5
save_every = "10 min"
"""


def test_specs(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    found = endure(mutants(SPEC), path.write_bytes, lambda: plans.read(path).check())
    assert min(found.values()) > 0


def test_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plans.Plan().write(path)
    valid = path.read_bytes()
    endure(mutants(valid), path.write_bytes, lambda: plans.read(path).check())
    endure(
        odd_values(json.loads(valid)),
        lambda value: path.write_text(json.dumps(value)),
        lambda: plans.read(path).check(),
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"[" * 100_000),
        ("a.toml", b"a = " + b"[" * 100_000),
        ("a.json", b" " * (MIB + 1)),
        ("a.json", b'{"model": "\\ud800"}'),
    ],
)
def test_specs_that_are_none(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError):
        plans.read(tmp_path / name)


def test_an_endless_spec_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").symlink_to("/dev/zero")
    with peak_below(8 * MIB), pytest.raises(UsageError, match="at most 1,048,576 bytes are read"):
        plans.read(tmp_path / "a.toml")


# --- checkpoints

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(3)}


def saved(directory: Path, record: Any, tensors: bytes | None = None) -> Path:
    """A checkpoint whose manifest agrees with whatever is in it."""
    content = tensors if tensors is not None else b"".join(tensor_file.encode(TENSORS))
    files = {publish.TENSORS: [content], publish.RECORD: [record]}
    return publish.put(directory, step=3, files=files)


@pytest.mark.parametrize("name", ["manifest.json", publish.TENSORS, publish.RECORD, "../latest"])
def test_checkpoints(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, b'{"steps": 3}') / name
    endure(
        mutants(path.read_bytes()),
        path.write_bytes,
        lambda: (checkpoint.load(tmp_path), checkpoint.latest(tmp_path)),
    )


def test_checkpoints_whose_manifest_agrees(tmp_path: Path) -> None:
    content = b"".join(tensor_file.encode(TENSORS))
    endure(
        (case for case in mutants(content) if case),
        lambda case: saved(tmp_path, b"{}", case),
        lambda: checkpoint.load(tmp_path / "step-00000003"),
    )
    (tmp_path / "b").mkdir()
    for record in (b"[" * 100_000, b"\xff", b"[]", b'{"a": ' + b"9" * 5000 + b"}"):
        with pytest.raises(CheckpointError):
            checkpoint.load(saved(tmp_path / "b", record))


@pytest.mark.parametrize(
    "shape", [[0, 1 << 63], [0, 1 << 62, 1 << 62], [1] * 100_000, [1 << 40], [-1], [1 << 32, 1 << 32]]
)
def test_tensors_of_shapes_that_lie(tmp_path: Path, shape: list[int]) -> None:
    size = 0 if 0 in shape else 4
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    place = saved(tmp_path, b"{}", struct.pack("<Q", len(text)) + text + bytes(size))
    try:
        assert checkpoint.load(place)[0]["a"].numel() == 0
    except CheckpointError as error:
        assert "is not a safetensors file" in str(error)  # noqa: PT017


def signed(manifest: dict[str, Any]) -> bytes:
    """A manifest with its own checksum."""

    def text(sha256: str) -> bytes:
        content = msgspec.json.encode({**manifest, "sha256": sha256})
        return msgspec.json.format(content, indent=2) + b"\n"

    return text(hashlib.sha256(text("")).hexdigest())


@pytest.mark.parametrize("name", ["../outside", "/dev/zero", "a\0b", "..", "x" * 200])
def test_a_manifest_names_files_of_its_own_directory(tmp_path: Path, name: str) -> None:
    place = saved(tmp_path, b"{}")
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"][name] = {"size_bytes": 0, "sha256": ""}
    (place / "manifest.json").write_bytes(signed(manifest))
    with pytest.raises(CheckpointError, match="is not a manifest"):
        checkpoint.load(place)


def test_a_manifest_vouches_for_all_that_is_read(tmp_path: Path) -> None:
    place = publish.put(tmp_path, step=3, files={publish.RECORD: [b"{}"]})
    (place / publish.TENSORS).write_bytes(b"".join(tensor_file.encode(TENSORS)))
    with pytest.raises(CheckpointError, match=r"does not vouch for tensors.safetensors"):
        checkpoint.load(place)


def test_a_hostile_neighbour_does_not_stop_saving(tmp_path: Path) -> None:
    """A number from which no save can count on, and names that look like numbers."""
    place = saved(tmp_path, b"{}")
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_bytes(signed(manifest | {"sequence": (1 << 64) - 1}))
    (tmp_path / ("step-" + "9" * 200)).mkdir()
    (tmp_path / "step-٠٠٠٠٠٠٠٥").mkdir()
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    checkpoint.save(tmp_path, step=7, tensors=TENSORS, record={})
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000007"
    assert checkpoint.load(tmp_path)[1] == {}


def session_of() -> Any:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return mh.session(model, optimizer, lambda model, batch: model(batch).square().mean(), scheduler=schedule)


@pytest.mark.processes
def test_resuming(tmp_path: Path) -> None:
    torch.manual_seed(0)
    session = session_of()
    data = torch.utils.data.TensorDataset(torch.rand(8, 3))
    for number, (batch,) in enumerate(session.batches(data, batch_size=2)):
        session.step(batch)
        if number == 1:
            session.save(tmp_path / "good")
            break
    session.close()
    tensors, record = checkpoint.load(tmp_path / "good")
    states = record.pop("optimizer")  # what is wrong in there PyTorch says in the first step

    places = [tmp_path]

    def put(changed: Any) -> None:
        places.append(tmp_path / str(len(places)))  # two sessions do not save in one place
        places[-1].mkdir()
        saved(
            places[-1],
            json.dumps({**changed, "optimizer": states}).encode(),
            b"".join(tensor_file.encode(tensors)),
        )

    def resume() -> None:
        session = session_of()
        try:
            session.resume(places[-1])
            for (batch,) in session.batches(data, batch_size=2):
                session.step(batch)
        finally:
            session.close()

    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = endure(odd_values(record), put, resume, is_bounded=False)
        assert min(found.values()) > 0
    torch.set_rng_state(state)


def test_orders_of_samples() -> None:
    order = DrawnOrder(torch.randperm(50), torch.tensor([10, 30, 50]))
    text = order.encode()
    again = DrawnOrder.decode(text)
    assert torch.equal(again.numbers, order.numbers)
    held: list[str] = []
    endure(
        mutants(text.encode()),
        lambda case: held.append(case.decode("latin-1")),
        lambda: DrawnOrder.decode(held[-1]),
    )
    values = np.zeros(3_000_000, dtype=np.int64)
    values[0] = 3
    bomb = base64.b85encode(zlib.compress(values.tobytes())).decode()
    with peak_below(MIB), pytest.raises(CheckpointError, match="an order of 3 samples has 7 numbers"):
        DrawnOrder.decode(bomb)


# --- what a run leaves

INVITE = invitation.Invite(
    invitation=Invitation(
        endpoint="tcp://10.0.0.1:29400", server_key="a" * 40, public_key="b" * 40, secret_key="c" * 40
    ),
    command=["-m", "x"],
    strategy="all-reduce",
    workers=2,
    servers=0,
    most=4,
    launcher=os.getpid(),
    memory_fd=0,
    mark="x",
)


def test_invitations(tmp_path: Path) -> None:
    with invitation.published(tmp_path, INVITE):
        path = tmp_path / invitation.FILE
        assert invitation.read(str(tmp_path)) == INVITE
        valid = path.read_bytes()
        endure(mutants(valid), path.write_bytes, lambda: invitation.read(str(tmp_path)))
        endure(
            odd_values(json.loads(valid)),
            lambda value: path.write_text(json.dumps(value)),
            lambda: invitation.read(str(tmp_path)).is_over(),
        )
        for content in (b"[" * 100_000, b'{"x": ' * 100_000, b" " * (2 * MIB)):
            path.write_bytes(content)
            with pytest.raises(UsageError):
                invitation.read(str(tmp_path))


def test_the_memory_of_an_invitation_is_a_memory(tmp_path: Path) -> None:
    """Not a file of another process that has the launcher's number now."""
    with (tmp_path / "mine").open("w+b") as mine:
        invite = msgspec.structs.replace(INVITE, memory_fd=mine.fileno())
        assert invite.is_over()
        with pytest.raises(UsageError, match="no longer there"):
            invite.open_memory()


def test_records(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "worker-0.jsonl"
    rows = [
        {"kind": "start", "t": 1.0, "rank": 0, "workers": 1, "total_steps": 4},
        {
            "kind": "step",
            "t": 1.5,
            "rank": 0,
            "step": 1,
            "epoch": 0,
            "loss": "nan",
            "samples": 8,
            "compute_s": 0.5,
        },
        {"kind": "log", "t": 1.6, "rank": 0, "step": 1, "values": {"lr": 0.1}},
        {"kind": "evaluate", "t": 1.7, "rank": 0, "step": 1, "loss": 0.5},
    ]
    valid = b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    def look() -> None:
        digest = Digest(1)
        digest.add(Tail(tmp_path).poll())
        assert digest.left_s() is None or digest.left_s() >= 0
        digest.shares()
        if list(read(tmp_path)):
            export(tmp_path).unlink()

    endure(mutants(valid), path.write_bytes, look)
    endure(
        odd_values(rows),
        lambda value: path.write_text("".join(json.dumps(row) + "\n" for row in value)),
        look,
    )


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.telemetry.read.LONGEST_LINE", MIB)
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "worker-0.jsonl"
    good = b'{"kind": "step", "t": 1.0, "rank": 0}\n'
    with path.open("wb") as file:
        file.truncate(30 * MIB)  # zeros that take no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + good)
    os.mkfifo(tmp_path / "events" / "pipe.jsonl")
    with peak_below(16 * MIB):
        assert len(list(read(tmp_path))) == 1
        tail = Tail(tmp_path)
        found = [record for _ in range(12) for record in tail.poll()]
        assert len(found) == 1


def test_summaries(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    path = tmp_path / "summary.json"
    endure(mutants(b'{"steps": 3, "loss": null}'), path.write_bytes, lambda: read_summary(tmp_path))
    for content in (b"[" * 100_000, b"[]", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ManyhandsError, match=r"summary.json cannot be read"):
            read_summary(tmp_path)


# --- names, and links that lead out of a run


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "..", "\0", "x" * 5000, "\ud800", ""])
def test_the_name_of_a_run_is_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with new_run(None, name) as run:
        assert run.parent == tmp_path / "runs"
    for place in ("x" * 5000, "a\0b"):
        with pytest.raises(UsageError, match="choose another with --out"), new_run(Path(place), "x"):
            pass


def linked(tmp_path: Path) -> tuple[Path, Path]:
    """A run from another person, and a file of one's own to which it links."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "worker-0.jsonl").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    return run, own / "worker-0.jsonl"


def test_a_run_whose_folders_are_links_is_refused(tmp_path: Path) -> None:
    run, own = linked(tmp_path)
    (run / "events").symlink_to(own.parent)
    with pytest.raises(UsageError, match="is a link to another place"):
        forget_records(make_directory(run))
    assert own.read_text() == "mine"


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    run, own = linked(tmp_path)
    make_directory(run)
    for name in ("plan.json", "events/worker-0.jsonl"):
        (run / name).symlink_to(own)
    with pytest.raises(OSError, match="it is a link"):
        plans.Plan().write(run / "plan.json")
    with pytest.raises(UsageError, match="it is a link to another place"):
        recorder.open(run / "events" / "worker-0.jsonl", rank=0)
    forget_records(run)
    assert own.read_text() == "mine"


def test_a_record_of_a_checkpoint_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "LARGEST_BYTES", 100)
    with pytest.raises(CheckpointError, match="at most 100 bytes are read"):
        checkpoint.load(saved(tmp_path, b" " * 101))
