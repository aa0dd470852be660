"""The user's own data, one test per form and its ways to go wrong."""

import multiprocessing
import pickle
import sys
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from manyhands.data import DATASETS, Data, StoredSet, gather, load, to_lmdb
from manyhands.errors import DataError, UnknownName, UsageError


def test_every_source_is_described_in_one_line() -> None:
    for name, source in DATASETS.items():
        assert source.form.startswith(name)
        assert source.description
        assert "\n" not in source.description


@pytest.mark.parametrize("text", ["nothing", "imagse:somewhere", "", ":", "..:x"])
def test_unknown_names_list_the_known_ones(text: str) -> None:
    with pytest.raises(UnknownName, match=r"known: cifar10, digits, .*synthetic"):
        load(text)


@pytest.mark.parametrize("name", ["images", "npz", "lmdb", "text"])
def test_a_missing_path_is_asked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"say which one, as in {name}:"):
        load(name)
    with pytest.raises(DataError, match="missing"):
        load(f"{name}:{tmp_path / 'missing'}")


# --- folders of pictures


def write_pictures(folder: Path, classes: dict[str, tuple[int, int, int]], count: int = 10) -> None:
    for name, colour in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            ending = "png" if number % 2 else "jpg"
            Image.new("RGB", (20 + number, 16), colour).save(folder / name / f"{number}.{ending}")


COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


def test_pictures_without_a_split(tmp_path: Path) -> None:
    write_pictures(tmp_path, COLOURS)
    (tmp_path / "red" / "notes.txt").write_text("not a picture")
    data = load(f"images:{tmp_path}", seed=3)
    assert (len(data.train), len(data.test), data.shape, data.classes) == (18, 2, (3, 16, 16), 2)
    images, labels = data.train.batch(torch.arange(18), 0)
    assert images.dtype == torch.float32
    for image, label in zip(images, labels.tolist(), strict=True):
        colour = torch.tensor(list(COLOURS.values())[label]) / 255
        torch.testing.assert_close(image.mean((1, 2)), colour, atol=0.02, rtol=0)
    assert set(data.test.batch(torch.arange(2), 0)[1].tolist()) == {0, 1}
    same, other = load(f"images:{tmp_path}", seed=3), load(f"images:{tmp_path}", seed=4)
    assert same.train.store.files == data.train.store.files
    assert other.train.store.files != data.train.store.files


def test_pictures_with_a_split_and_a_size(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", COLOURS, count=4)
    write_pictures(tmp_path / "test", COLOURS, count=3)
    data = load(f"images:{tmp_path}", size=24, augment=True)
    assert (len(data.train), len(data.test), data.shape) == (8, 6, (3, 24, 24))
    assert data.train.batch(torch.tensor([7, 0]), 1)[0].shape == (2, 3, 24, 24)


def test_the_middle_square_is_cut_out(tmp_path: Path) -> None:
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 255
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "1.png")
    images, _ = load(f"images:{tmp_path}").train.batch(torch.arange(1), 0)
    assert torch.equal(images, torch.ones(1, 3, 8, 8))


def test_pictures_are_normalised_by_what_is_given(tmp_path: Path) -> None:
    write_pictures(tmp_path, COLOURS)
    given = "mean=0.5-0.25-0.0,deviation=0.5-1-2"
    plain, _ = load(f"images:{tmp_path}").train.batch(torch.arange(2), 0)
    images, _ = load(f"images:{tmp_path},{given}").train.batch(torch.arange(2), 0)
    mean, deviation = (torch.tensor(row).view(3, 1, 1) for row in ((0.5, 0.25, 0.0), (0.5, 1.0, 2.0)))
    assert torch.equal(images, (plain - mean) / deviation)
    to_lmdb(load(f"images:{tmp_path},{given}"), tmp_path / "a.lmdb")
    same(load(f"lmdb:{tmp_path / 'a.lmdb'}"), load(f"images:{tmp_path},{given}"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mean=0.5,deviation=0.5", "mean has 1 numbers and the samples have 3 channels"),
        ("mean=0.5-0.5-0.5", "deviation has 0 numbers and the samples have 3 channels"),
        ("mean=0.5-0.5-0.5,deviation=1-0-1", "a deviation must be above 0"),
        ("mean=white", "expected a number"),
    ],
)
def test_a_normalisation_that_does_not_fit(tmp_path: Path, given: str, message: str) -> None:
    write_pictures(tmp_path, COLOURS)
    with pytest.raises(UsageError, match=message):
        load(f"images:{tmp_path},{given}")


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path, COLOURS)
    broken = tmp_path / "red" / "3.png"
    broken.write_bytes(broken.read_bytes()[:40])
    data = load(f"images:{tmp_path}")
    part = data.train if broken in data.train.store.files else data.test
    with pytest.raises(DataError, match=r"red/3.png is not a picture that can be read"):
        part.batch(torch.arange(len(part)), 0)


@pytest.mark.parametrize("tested", ["test", "val", "valid", "validation"])
def test_folders_named_train_and_val_are_the_split(tmp_path: Path, tested: str) -> None:
    three = COLOURS | {"green": (0, 255, 0)}
    write_pictures(tmp_path / "train", three)
    write_pictures(tmp_path / tested, three, count=4)
    data = load(f"images:{tmp_path}")
    assert (len(data.train), len(data.test), data.classes) == (30, 12, 3)
    assert data.note == f"{tmp_path}: training on train, testing with {tested}"


def test_of_two_test_folders_the_first_is_used_and_the_other_named(tmp_path: Path) -> None:
    for part, count in (("train", 10), ("val", 4), ("test", 3)):
        write_pictures(tmp_path / part, COLOURS, count)
    data = load(f"images:{tmp_path}")
    assert (len(data.train), len(data.test)) == (20, 6)
    assert data.note.endswith("training on train, testing with test; val unused")


def test_a_train_folder_alone_is_split(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", COLOURS)
    data = load(f"images:{tmp_path}")
    assert (len(data.train), len(data.test), data.classes) == (18, 2, 2)
    assert data.note.endswith("training on train, a tenth of it held out for testing")


def test_pictures_of_trains_are_a_class(tmp_path: Path) -> None:
    write_pictures(tmp_path, {"car": (0, 0, 255), "train": (255, 0, 0)})
    data = load(f"images:{tmp_path}")
    assert (data.classes, data.note) == (2, "")


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "empty" / "class").mkdir(parents=True)
    with pytest.raises(DataError, match="0 pictures in 1 class folders"):
        load(f"images:{tmp_path / 'empty'}")
    write_pictures(tmp_path / "odd" / "train", {"red": (255, 0, 0)})
    write_pictures(tmp_path / "odd" / "test", COLOURS)
    with pytest.raises(DataError, match="classes blue that"):
        load(f"images:{tmp_path / 'odd'}")


# --- npz


def test_npz_of_byte_pictures(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 6, 5), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 4)
    data = load(f"npz:{tmp_path / 'a.npz'}")
    assert (len(data.train), len(data.test), data.shape, data.classes) == (36, 4, (1, 6, 5), 4)
    images, _ = data.train.batch(torch.arange(36), 0)
    assert images.max() <= 1
    resized = load(f"npz:{tmp_path / 'a.npz'}", size=10, augment=True)
    assert resized.train.batch(torch.arange(3), 0)[0].shape == (3, 1, 10, 10)


def test_npz_with_its_own_split_and_channels_last(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((10, 6, 5, 3))
    np.savez(tmp_path / "a.npz", x=x[:7], y=np.zeros(7, np.uint8), x_test=x[7:], y_test=np.array([1, 2, 5]))
    data = load(f"npz:{tmp_path / 'a.npz'}")
    assert (len(data.train), len(data.test), data.shape, data.classes) == (7, 3, (3, 6, 5), 6)
    found, labels = data.test.batch(torch.arange(3), 0)
    torch.testing.assert_close(found, torch.from_numpy(x[7:]).permute(0, 3, 1, 2).float())
    assert labels.tolist() == [1, 2, 5]


def test_npz_of_plain_features(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.eye(20), y=np.arange(20) % 2)
    assert load(f"npz:{tmp_path / 'a.npz'}").shape == (20,)
    with pytest.raises(UsageError, match=r"shape \(20,\) are not pictures"):
        load(f"npz:{tmp_path / 'a.npz'}", size=8)
    with pytest.raises(UsageError, match="mean and deviation are for pictures"):
        load(f"npz:{tmp_path / 'a.npz'},mean=0.5,deviation=0.5")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 2))}, "has no array y; it has x"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4)}, "expected 4 whole numbers"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, "expected 4 whole numbers"),
        ({"x": np.zeros((4, 2)), "y": -np.ones(4, int)}, "from 0 up"),
        ({"x": np.zeros(4), "y": np.zeros(4, int)}, "expected numbers, samples × shape"),
        ({"x": np.array([{}, {}]), "y": np.zeros(2, int)}, "plain arrays"),
    ],
)
def test_npz_that_does_not_fit(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load(f"npz:{tmp_path / 'a.npz'}")


def test_npz_that_is_none(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"PK\3\4broken"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as a numpy archive"):
            load(f"npz:{tmp_path / 'a.npz'}")


# --- lmdb


def same(one: Data, other: Data, epoch: int = 0) -> None:
    for a, b in ((one.train, other.train), (one.test, other.test)):
        assert len(a) == len(b)
        indices = torch.randperm(len(a), generator=torch.Generator().manual_seed(0))[:50]
        for left, right in zip(gather(a, indices, epoch), gather(b, indices, epoch), strict=True):
            assert torch.equal(left, right)
    assert (one.shape, one.classes, one.task) == (other.shape, other.classes, other.task)


def test_lmdb_gives_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    seen: list[tuple[str, int, int | None]] = []
    for number, data in enumerate(
        (load("digits"), load("digits", size=12), load("synthetic:2x4x4:3,samples=30"))
    ):
        path = tmp_path / f"{number}.lmdb"
        to_lmdb(data, path, lambda *step: seen.append(step))
        same(load(f"lmdb:{path}"), data)
    assert seen[-1][1:] == (36, 36)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.lmdb", "1.lmdb", "2.lmdb"]
    # Bytes stay bytes: 64 of picture and 8 of label, not 256 + 8.
    assert (tmp_path / "0.lmdb").stat().st_size < 400_000


def test_lmdb_of_text_and_of_a_users_data(tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    (tmp_path / "a.txt").write_bytes(b"the cat sat on the mat. " * 40)
    data = load(f"text:{tmp_path / 'a.txt'},length=8")
    to_lmdb(data, tmp_path / "text.lmdb")
    same(load(f"lmdb:{tmp_path / 'text.lmdb'}"), data)
    tensors = TensorDataset(torch.rand(6, 3), torch.arange(6) % 2)
    data = Data(name="own", train=tensors, test=tensors, shape=(3,), classes=2, task="classify")
    to_lmdb(data, tmp_path / "own.lmdb")
    same(load(f"lmdb:{tmp_path / 'own.lmdb'}"), data)


def _first_labels(dataset: StoredSet, answer: "SimpleQueue[list[int]]") -> None:
    answer.put(dataset.batch(torch.arange(20), 0)[1].tolist())


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_lmdb_is_read_in_several_processes(tmp_path: Path, method: str) -> None:
    pytest.importorskip("lmdb")
    to_lmdb(load("digits"), tmp_path / "d.lmdb")
    dataset = load(f"lmdb:{tmp_path / 'd.lmdb'}").train
    expected = dataset.batch(torch.arange(20), 0)[1].tolist()
    context = multiprocessing.get_context(method)
    answer = context.SimpleQueue()
    children = [context.Process(target=_first_labels, args=(dataset, answer)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert [answer.get(), answer.get()] == [expected, expected]
    assert dataset.batch(torch.arange(20), 0)[1].tolist() == expected
    answer.close()


def test_lmdb_may_be_loaded_twice_and_pickled(tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    to_lmdb(load("digits"), tmp_path / "d.lmdb")
    one, two = load(f"lmdb:{tmp_path / 'd.lmdb'}"), load(f"lmdb:{tmp_path / 'd.lmdb'}")
    same(one, two)
    again = pickle.loads(pickle.dumps(one.train))
    assert torch.equal(again[3][0], one.train[3][0])


def test_lmdb_that_is_not_ours_or_damaged(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    (tmp_path / "a").write_bytes(b"hello" * 1000)
    with pytest.raises(DataError, match="cannot be read as an LMDB file"):
        load(f"lmdb:{tmp_path / 'a'}")
    with (
        lmdb.open(str(tmp_path / "b"), subdir=False, lock=False) as other,
        other.begin(write=True) as transaction,
    ):
        transaction.put(b"key", b"value")
    with pytest.raises(DataError, match="not one written by manyhands"):
        load(f"lmdb:{tmp_path / 'b'}")
    to_lmdb(load("digits"), tmp_path / "c")
    with (
        lmdb.open(str(tmp_path / "c"), subdir=False, lock=False) as ours,
        ours.begin(write=True) as transaction,
    ):
        transaction.put(b"train/0000000003", b"short")
    with pytest.raises(DataError, match="train sample 3 has 5 bytes instead of 72"):
        load(f"lmdb:{tmp_path / 'c'}").train.batch(torch.arange(5), 0)


# --- text


def test_text_windows_cover_each_token_once(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    (tmp_path / "a.txt").write_bytes(content)
    data = load(f"text:{tmp_path / 'a.txt'},length=10")
    assert (data.shape, data.classes, data.task) == ((10,), 256, "next-token")
    inputs, targets = data.train.batch(torch.arange(len(data.train)), 0)
    assert inputs.dtype == targets.dtype == torch.int64
    train = content[: len(content) - 102]
    whole = (len(train) - 1) // 10 * 10
    assert bytes(inputs.flatten().tolist()) == train[:whole]
    assert bytes(targets.flatten().tolist()) == train[1 : whole + 1]
    held_out, _ = data.test.batch(torch.arange(len(data.test)), 0)
    assert bytes(held_out.flatten().tolist()) == content[-102:-2]


def test_text_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="100 bytes and its last tenth 10, too few for a window of 64"):
        load(f"text:{tmp_path / 'a.txt'}")
    with pytest.raises(UsageError, match="length must be at least 1"):
        load(f"text:{tmp_path / 'a.txt'},length=0")
    with pytest.raises(UnknownName, match="known: length"):
        load(f"text:{tmp_path / 'a.txt'},lenght=3")
    with pytest.raises(UsageError, match="size cannot be set"):
        load(f"text:{tmp_path / 'a.txt'}", size=3)
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"a.txt is empty"):
        load(f"text:{tmp_path / 'a.txt'}")


# --- synthetic


def test_synthetic_samples_depend_on_seed_and_number_alone() -> None:
    text = "synthetic:3x9x7:5,samples=100"
    data = load(text, seed=2)
    assert (len(data.train), len(data.test), data.shape, data.classes) == (100, 20, (3, 9, 7), 5)
    whole, labels = data.train.batch(torch.arange(100), 0)
    assert set(labels.tolist()) == set(range(5))
    some = torch.tensor([70, 3, 3])
    again, again_labels = load(text, seed=2).train.batch(some, 9)
    assert torch.equal(again, whole[some])
    assert torch.equal(again_labels, labels[some])
    assert not torch.equal(load(text, seed=3).train.batch(some, 0)[0], again)
    assert len(torch.unique(whole.flatten(1), dim=0)) == 100
    assert not torch.equal(data.test.batch(torch.arange(20), 0)[0], whole[:20])


@pytest.mark.parametrize("shape", ["3x16x16", "64"])
def test_synthetic_can_be_learned(shape: str) -> None:
    torch.manual_seed(0)
    data = load(f"synthetic:{shape}:10,samples=1000")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    images, labels = data.train.batch(torch.arange(1000), 0)
    model(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for indices in torch.split(torch.randperm(1000), 50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
        optimizer.step()
    images, labels = data.test.batch(torch.arange(len(data.test)), 0)
    assert float((model(images).argmax(1) == labels).float().mean()) > 0.9


@pytest.mark.parametrize(
    "text", ["synthetic", "synthetic:3x32x32", "synthetic:axb:10", "synthetic:3x0:10", "synthetic:3x3:1"]
)
def test_synthetic_that_does_not_fit(text: str) -> None:
    with pytest.raises(UsageError, match="as in synthetic:3x32x32:10"):
        load(text)


# --- package.module:callable


class _Own(Dataset):
    def __init__(self, count: int = 30) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(index)), index % 4


class _Named(_Own):
    classes = ("a", "b", "c", "d", "e")


class _Stream(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield 1


class _Dictionaries(_Own):
    def __getitem__(self, index: int) -> dict[str, int]:  # type: ignore[override]
        return {"x": index}


def one() -> _Own:
    return _Own()


def pair() -> tuple[_Named, _Own]:
    return _Named(), _Own(7)


def whole() -> Data:
    return load("digits")


def tokens() -> TensorDataset:
    windows = torch.arange(40).view(10, 4)
    return TensorDataset(windows, windows + 1)


def stream() -> _Stream:
    return _Stream()


def dictionaries() -> _Dictionaries:
    return _Dictionaries()


def regression() -> TensorDataset:
    return TensorDataset(torch.rand(9, 2), torch.rand(9))


def nothing() -> _Own:
    return _Own(0)


not_callable = 3


def test_own_data_set_is_split_and_understood() -> None:
    data = load(f"{__name__}:one")
    assert (len(data.train), len(data.test), data.shape, data.classes) == (27, 3, (2, 3), 4)
    assert data.task == "classify"
    inputs, _ = gather(data.train, torch.arange(27), 0)
    test_inputs, _ = gather(data.test, torch.arange(3), 0)
    assert sorted(torch.cat([inputs, test_inputs])[:, 0, 0].tolist()) == list(range(30))


def test_own_pair_and_own_data() -> None:
    data = load(f"{__name__}:pair")
    assert (len(data.train), len(data.test), data.classes) == (30, 7, 5)
    assert load(f"{__name__}:whole").name == "digits"


def test_own_tokens() -> None:
    data = load(f"{__name__}:tokens")
    assert (data.shape, data.classes, data.task) == ((4,), 41, "next-token")


def test_a_module_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_samples.py").write_text(
        "from manyhands.data import load\ndef make(): return load('digits')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(load("my_own_samples:make").test) == 360
    sys.modules.pop("my_own_samples")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("stream", DataError, "returned a _Stream; expected a Data"),
        ("dictionaries", DataError, r"not pairs of \(input, target\)"),
        ("regression", DataError, "targets are torch.float32, so there are no classes"),
        ("nothing", DataError, "empty data set"),
        ("not_callable", UsageError, "an? int, not something to call"),
        ("absent", UsageError, "has no 'absent'"),
    ],
)
def test_own_data_that_does_not_fit(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(f"{__name__}:{name}")
