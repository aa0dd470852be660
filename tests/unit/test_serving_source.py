"""What a source sees of folders that others write: whole versions, or nothing."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from manyhands import checkpoint
from manyhands.errors import CheckpointError, UsageError
from manyhands.serving import version_folder
from manyhands.serving.description import Description, TensorForm, decode, read
from manyhands.serving.loader import estimated_bytes
from manyhands.serving.source import VersionSource

FORM = Description(
    model="mlp",
    task="classify",
    input=TensorForm(name="input", type="FP32", shape=(-1, 2)),
    output=TensorForm(name="output", type="FP32", shape=(-1, 2)),
    classes=2,
)
FILES = {"weights.safetensors": [b"weights"], "description.json": [FORM.encode()]}


def seen(source: VersionSource, now_s: float = 0.0) -> list[int]:
    return [one.version for one in source.look(now_s)]


def test_versions_of_a_folder_come_and_go(tmp_path: Path) -> None:
    source = VersionSource("m", tmp_path)
    assert seen(source) == []
    for number in (1, 10, 2):
        version_folder.write(tmp_path, number, 0, FILES)
    assert seen(source) == [1, 2, 10]
    shutil.rmtree(tmp_path / "2")
    assert seen(source) == [1, 10]
    assert version_folder.next_version(tmp_path) == 11
    with pytest.raises(UsageError, match="a version never changes"):
        version_folder.write(tmp_path, 10, 0, FILES)


def test_what_is_no_version_is_passed_over(tmp_path: Path) -> None:
    for name in ("1", "02", "0", "x", "-3", "9" * 20, ".4.123.partial", "step-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "5").write_text("a file")
    (tmp_path / "6").symlink_to("/proc/self")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "manifest.json").write_text("{}")
    assert seen(VersionSource("m", tmp_path)) == [7], "with a manifest it counts: loading says what is wrong"


def test_a_version_that_is_written_meanwhile_is_never_seen_in_part(tmp_path: Path) -> None:
    over, broken = threading.Event(), []

    def look() -> None:
        source = VersionSource("m", tmp_path)
        now_s = 0.0
        while not over.is_set():
            now_s += 2.0
            for one in source.look(now_s):
                try:
                    version_folder.verified(one.place)
                except (CheckpointError, OSError) as error:
                    broken.append((one, error))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1, 31):
        version_folder.write(tmp_path, number, 0, FILES)
    over.set()
    thread.join()
    assert broken == []


def test_a_run_counts_its_versions_by_its_saves_and_not_by_its_steps(tmp_path: Path) -> None:
    saves = tmp_path / "checkpoints"
    source = VersionSource("m", tmp_path)
    tensors = {"model/a": torch.ones(100), "optimizer/a/momentum": torch.ones(100)}
    for step in (10, 20, 15):
        place = checkpoint.save(saves, step=step, tensors=tensors, record={}, keep=2)
    assert seen(source, 5.0) == [2, 3]
    assert source.look(5.0)[-1].place == place
    assert estimated_bytes(place) == 400, "the optimizer's state is not loaded"
    checkpoint.save(saves, step=15, tensors=tensors, record={})
    assert seen(source, 5.0) == [2, 4], "a step that was saved again is another version"


def test_another_folder_under_the_same_number_is_another_version(tmp_path: Path) -> None:
    version_folder.write(tmp_path / "a", 1, 0, FILES)
    source = VersionSource("m", tmp_path / "a")
    (before,) = source.look(0.0)
    version_folder.write(tmp_path / "b", 1, 0, FILES)
    shutil.rmtree(tmp_path / "a" / "1")
    os.rename(tmp_path / "b" / "1", tmp_path / "a" / "1")
    (after,) = source.look(0.0)
    assert before < after, "the later one is the newer one"
    assert before.version == after.version == 1


def test_a_folder_that_is_a_version_itself_and_one_that_is_removed(tmp_path: Path) -> None:
    place = version_folder.write(tmp_path / "a", 3, 0, FILES)
    source = VersionSource("m", place)
    assert seen(source) == [3]
    shutil.rmtree(tmp_path / "a")
    assert seen(source, 9.0) == [3], "what is served goes on"
    with pytest.raises(UsageError, match="there is no folder"):
        VersionSource("m", tmp_path / "a")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format": 2}',
        b"[" * 100_000,
        FORM.encode().replace(b"FP32", b"FP99"),
        FORM.encode().replace(b'"classes"', b'"extra": 1, "classes"'),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_description_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"description\.json"):
        decode(content)
    (tmp_path / "description.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path)


def test_an_estimate_of_a_damaged_file_is_nothing(tmp_path: Path) -> None:
    for content in (b"", b"\xff" * 100, (1 << 60).to_bytes(8, "little"), b"\x02" + b"\0" * 7 + b"[]"):
        (tmp_path / "weights.safetensors").write_bytes(content)
        assert estimated_bytes(tmp_path) == 0
