"""What a checkpoint promises: whatever happens, the newest that was reported complete can be loaded.

Crashes are data: a `FaultyDisk` stops the world at its k-th operation, and every k is tried.
"""

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manyhands.checkpoint import latest, load, save, save_weights
from manyhands.checkpoint.disk import Disk
from manyhands.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from manyhands.errors import CheckpointError, UsageError

FILES = ("tensors.safetensors", "record.json", "manifest.json")


def state(step: int, variant: str = "") -> dict[str, Any]:
    """The arguments of a save; everything in it follows from the step and the variant."""
    generator = torch.Generator().manual_seed(step * 7 + len(variant))
    tensors = {"weight": torch.randn(5, 3, generator=generator), "steps": torch.tensor(step)}
    return {"step": step, "tensors": tensors, "record": {"step": step, "variant": variant, "loss": step / 3}}


def loaded_state(path: Path) -> tuple[int, str]:
    """Load without any warning and name the state; anything but exactly a saved state fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors, record = load(path)
    expected = state(record["step"], record["variant"])
    assert record == expected["record"]
    assert same(tensors, expected["tensors"])
    return record["step"], record["variant"]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


class Crash(BaseException):
    """The end of the world: not an Exception, so that no handler tidies up."""


class FaultyDisk(Disk):
    """A disk on which the k-th operation does not happen; if it is a write, half of it does.

    `kill` is the death of the process: whatever was done stays. `power` is the death of the machine: whatever
    was not synced is lost, except removals. `reorder` is worse: a moved pointer stays where it was moved to.
    `full` is an error, after which life goes on. Nothing is really synced: trying every crash is cheap.
    """

    def __init__(self, crash_at: int | None = None, kind: str = "kill") -> None:
        self.crash_at = crash_at
        self.kind = kind
        self.operations = 0
        self.unsynced_files: dict[int, int] = {}  # inode → open handle, which stays valid across renames
        self.unsynced_entries: dict[int, list[Callable[[], None]]] = {}  # inode of directory → how to undo
        self.handles: list[int] = []

    def __enter__(self) -> "FaultyDisk":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            os.close(handle)

    def make_directory(self, path: Path) -> None:
        self._operation()
        super().make_directory(path)
        self._undo(path.parent, lambda: shutil.rmtree(path, ignore_errors=True))

    def write(self, path: Path, chunks: Iterable[bytes]) -> None:
        content = b"".join(chunks)
        fails = self.operations == self.crash_at
        created = not path.exists()
        super().write(path, [content[: len(content) // 2] if fails else content])
        self.unsynced_files[path.stat().st_ino] = self._handle(path, os.O_RDWR)
        if created:
            parent = self._handle(path.parent, os.O_RDONLY)
            self._undo(path.parent, lambda: os.unlink(path.name, dir_fd=parent))
        self._operation()

    def sync(self, path: Path) -> None:
        self._operation()
        inode = path.stat().st_ino
        (self.unsynced_entries if path.is_dir() else self.unsynced_files).pop(inode, None)

    def rename(self, source: Path, target: Path) -> None:
        self._operation()
        before = target.read_bytes() if target.is_file() else None
        super().rename(source, target)

        def undo() -> None:
            os.rename(target, source)
            if before is not None:
                target.write_bytes(before)

        if target.is_dir() or self.kind != "reorder":
            self._undo(target.parent, undo)

    def remove(self, path: Path) -> None:
        self._operation()
        super().remove(path)

    def _operation(self) -> None:
        if self.operations == self.crash_at:
            self.crash_at = None
            if self.kind == "full":
                raise OSError(28, "No space left on device")
            if self.kind in ("power", "reorder"):
                self.lose_unsynced()
            raise Crash
        self.operations += 1

    def lose_unsynced(self) -> None:
        for handle in self.unsynced_files.values():
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
        for undo in reversed([undo for undos in self.unsynced_entries.values() for undo in undos]):
            with contextlib.suppress(FileNotFoundError):  # its file has been moved or removed for good
                undo()

    def _undo(self, directory: Path, undo: Callable[[], None]) -> None:
        self.unsynced_entries.setdefault(directory.stat().st_ino, []).append(undo)

    def _handle(self, path: Path, flags: int) -> int:
        handle = os.open(path, flags)
        self.handles.append(handle)
        return handle


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Saves that were reported complete, and then the one that crashes; each is a step and a variant."""

    name: str
    complete: list[tuple[int, str]]
    crashing: tuple[int, str]
    keep: int

    def before(self, directory: Path) -> Path:
        """The directory as it is before the save that crashes."""
        with FaultyDisk() as disk:
            for step, variant in self.complete:
                save(directory, **state(step, variant), keep=9, disk=disk)
        return directory

    def crash(self, directory: Path, disk: FaultyDisk) -> None:
        save(directory, **state(*self.crashing), keep=self.keep, disk=disk)

    def operations(self, before: Path, copy: Path) -> int:
        """How many operations the save takes when nothing happens."""
        with FaultyDisk() as disk:
            self.crash(fresh(before, copy), disk)
        return disk.operations


SCENARIOS = [
    Scenario(name="first", complete=[], crashing=(1, ""), keep=3),
    Scenario(name="second", complete=[(1, "")], crashing=(2, ""), keep=3),
    Scenario(name="pruning", complete=[(1, ""), (2, ""), (3, "")], crashing=(4, ""), keep=2),
    Scenario(name="same-step", complete=[(1, ""), (2, "")], crashing=(2, "again"), keep=3),
    Scenario(name="same-step-alone", complete=[(2, "")], crashing=(2, "again"), keep=1),
    Scenario(name="back-to-a-lower-step", complete=[(1, ""), (3, "")], crashing=(2, ""), keep=2),
]
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


def fresh(template: Path, target: Path) -> Path:
    """The target as a new copy of a directory, which may not exist."""
    shutil.rmtree(target, ignore_errors=True)
    if template.exists():
        shutil.copytree(template, target)
    return target


def check_after_crash(scenario: Scenario, directory: Path) -> None:
    """The last complete state or the one being saved is there, whole."""
    possible = {scenario.crashing, *scenario.complete[-1:]}
    try:
        assert loaded_state(directory) in possible
    except CheckpointError:
        assert not scenario.complete
        assert latest(directory) is None
    else:
        place = latest(directory)
        assert place is not None
        assert loaded_state(place) in possible
    if (directory / "latest").exists():
        name = (directory / "latest").read_text().strip()
        assert names(directory) & {name, f"{name}.replaced"}, "the pointer moved too early"


def check_next_save(directory: Path, keep: int) -> None:
    """Life goes on after a crash, and nothing of it remains."""
    with FaultyDisk() as disk:
        save(directory, **state(9), keep=keep, disk=disk)
    assert loaded_state(directory) == (9, "")
    assert latest(directory) == directory / "step-00000009"
    assert "step-00000009" in names(directory)
    assert len(names(directory)) <= keep + 1
    assert all(
        name == "latest" or (name.startswith("step-") and "." not in name) for name in names(directory)
    )


@every_scenario
@pytest.mark.parametrize("kind", ["kill", "power", "reorder"])
def test_a_crash_at_any_operation_leaves_the_newest_checkpoint(
    scenario: Scenario, kind: str, tmp_path: Path
) -> None:
    before = scenario.before(tmp_path / "before")
    total = scenario.operations(before, tmp_path / "copy")
    for crash_at in range(total):
        directory = fresh(before, tmp_path / "copy")
        with FaultyDisk(crash_at, kind) as disk, pytest.raises(Crash):
            scenario.crash(directory, disk)
        check_after_crash(scenario, directory)
        check_next_save(directory, scenario.keep)


@every_scenario
def test_what_was_reported_complete_survives_a_power_cut(scenario: Scenario, tmp_path: Path) -> None:
    directory = scenario.before(tmp_path / "run" / "checkpoints")
    with FaultyDisk() as disk:
        scenario.crash(directory, disk)
        disk.lose_unsynced()
    assert loaded_state(directory) == scenario.crashing


@every_scenario
def test_a_crash_while_recovering_from_a_crash(scenario: Scenario, tmp_path: Path) -> None:
    before = scenario.before(tmp_path / "before")
    for crash_at in range(scenario.operations(before, tmp_path / "copy")):
        crashed = fresh(before, tmp_path / "crashed")
        with FaultyDisk(crash_at) as disk, pytest.raises(Crash):
            scenario.crash(crashed, disk)
        again = range(scenario.operations(crashed, tmp_path / "copy"))
        for second_crash_at in random.Random(crash_at).sample(again, 2):
            directory = fresh(crashed, tmp_path / "copy")
            with FaultyDisk(second_crash_at, "power") as disk, pytest.raises(Crash):
                scenario.crash(directory, disk)
            check_after_crash(scenario, directory)
            check_next_save(directory, scenario.keep)


@every_scenario
def test_an_error_of_the_disk_is_reported_and_harms_nothing(scenario: Scenario, tmp_path: Path) -> None:
    before = scenario.before(tmp_path / "before")
    errors = 0
    for crash_at in range(scenario.operations(before, tmp_path / "copy")):
        directory = fresh(before, tmp_path / "copy")
        with FaultyDisk(crash_at, "full") as disk, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                scenario.crash(directory, disk)
            except CheckpointError as error:
                errors += 1
                assert "No space left on device" in str(error)  # noqa: PT017 - not raising is right as well
                left = [] if not directory.exists() else names(directory)
                assert not [name for name in left if name.startswith(".step-")], "a full disk stays full"
            else:
                assert "could not be removed: No space left on device" in str(caught[0].message)
                assert loaded_state(directory) == scenario.crashing
        check_after_crash(scenario, directory)
        check_next_save(directory, scenario.keep)
    assert errors > 0


class LyingDisk(FaultyDisk):
    """A disk that loses the end of a file and says that all is well."""

    def write(self, path: Path, chunks: Iterable[bytes]) -> None:
        content = b"".join(chunks)
        super().write(path, [content[:-1] if path.name in FILES else content])


def test_what_was_written_is_read_back_before_it_counts(tmp_path: Path) -> None:
    save(tmp_path, **state(1))
    with (
        LyingDisk() as disk,
        pytest.raises(CheckpointError, match=r"step 2 could not be saved .*manifest.json"),
    ):
        save(tmp_path, **state(2), disk=disk)
    assert names(tmp_path) == {"step-00000001", "latest"}
    assert loaded_state(tmp_path) == (1, "")


SAVING_PROCESS = """
import os, signal, sys, time
from pathlib import Path
import torch
from tests.contracts.test_checkpoint import state
from manyhands.checkpoint import save

directory = Path(sys.argv[1])
torch.set_num_threads(1)
step = 0
for line in sys.stdin:
    delay_s = float(line)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        while True:
            step += 1
            save(directory, **state(step), keep=2)
            os.write(writing, b"%d\\n" % step)
    os.close(writing)
    with open(reading) as reports:
        first = reports.readline()
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        reported = (first + reports.read()).split()
    _, status = os.waitpid(child, 0)
    step = int(reported[-1]) + 1
    print(os.waitstatus_to_exitcode(status), reported[-1], flush=True)
"""


@pytest.mark.processes
def test_a_process_killed_at_random_moments(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    moments = random.Random(20)
    interrupted = 0
    # One interpreter imports torch and forks the processes that are killed.
    with subprocess.Popen(
        [sys.executable, "-c", SAVING_PROCESS, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdin
        assert process.stdout
        for _ in range(15):
            process.stdin.write(f"{moments.uniform(0, 0.05)}\n")
            process.stdin.flush()
            returncode, reported = map(int, process.stdout.readline().split())
            assert returncode == -9
            assert loaded_state(directory)[0] in (reported, reported + 1)
            interrupted += any(name.endswith(".partial") for name in names(directory))
        process.stdin.close()
    assert process.returncode == 0
    assert interrupted > 0, "no kill came in the middle of a save"
    check_next_save(directory, keep=2)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def corruptions(place: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every way to harm one file: each byte flipped, cut at several lengths, longer, gone."""
    for name in FILES:
        content = (place / name).read_bytes()
        for position in range(len(content)):
            yield name, partial(flip, place / name, position)
        for length in (0, 1, len(content) // 2, len(content) - 1):
            yield name, partial(os.truncate, place / name, length)
        yield name, partial((place / name).write_bytes, content + b" ")
        yield name, (place / name).unlink


def test_every_corruption_of_the_newest_is_noticed_and_the_one_before_is_used(tmp_path: Path) -> None:
    save(tmp_path, **state(10))
    place = save(tmp_path, **state(20))
    tried = 0
    for name, harm in corruptions(place):
        sound = (place / name).read_bytes()
        harm()
        with pytest.warns(
            UserWarning, match=rf"step-00000020 cannot be used: .*{name}.*using step-00000010"
        ) as seen:
            tensors, record = load(tmp_path)
        assert len(seen) == 1
        assert record == state(10)["record"]
        assert same(tensors, state(10)["tensors"])
        with pytest.raises(CheckpointError, match=rf"step-00000020 cannot be used: .*{name}"):
            load(place)
        (place / name).write_bytes(sound)
        tried += 1
    assert tried > 500
    assert loaded_state(tmp_path) == (20, "")


def test_damage_to_older_checkpoints_is_of_no_interest(tmp_path: Path) -> None:
    older = save(tmp_path, **state(10))
    save(tmp_path, **state(20))
    for name in FILES:
        (older / name).unlink()
        assert loaded_state(tmp_path) == (20, "")


@pytest.mark.parametrize("position", range(len("step-00000020\n")))
def test_damage_to_the_pointer_changes_nothing(position: int, tmp_path: Path) -> None:
    for step in (10, 20, 21):
        save(tmp_path, **state(step))
    flip(tmp_path / "latest", position)
    assert loaded_state(tmp_path) == (21, "")
    assert latest(tmp_path) in {tmp_path / "step-00000021", tmp_path / "step-00000020"}
    (tmp_path / "latest").unlink()
    assert loaded_state(tmp_path) == (21, "")
    assert latest(tmp_path) == tmp_path / "step-00000021"


def test_all_damaged_lists_what_was_tried_and_why(tmp_path: Path) -> None:
    (save(tmp_path, **state(10)) / "record.json").unlink()
    os.truncate(save(tmp_path, **state(20)) / "tensors.safetensors", 10)
    (save(tmp_path, **state(30)) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    for part in (
        str(tmp_path),
        "step-00000030",
        "not a manifest",
        "step-00000020",
        "has 10 bytes instead of",
    ):
        assert part in str(caught.value)
    assert "step-00000010 cannot be used: record.json cannot be read (No such file or directory)" in str(
        caught.value
    )
    save(tmp_path, **state(40))
    assert loaded_state(tmp_path) == (40, "")


def test_a_damaged_newest_after_going_back_is_noticed_by_its_pointer(tmp_path: Path) -> None:
    for step in (10, 30, 20):
        save(tmp_path, **state(step))
    flip(tmp_path / "step-00000020" / "manifest.json", 40)
    with pytest.warns(UserWarning, match="step-00000020 cannot be used: .*using step-00000030"):
        load(tmp_path)


def test_a_newer_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    place = save(tmp_path, **state(10))
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "format": 2, "new": True}))
    with pytest.raises(CheckpointError, match="says format 2, this version of manyhands reads format 1"):
        load(place)


@pytest.mark.parametrize("path", ["nowhere", "step-00000001", "."])
def test_nothing_to_load(path: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in|cannot be used"):
        load(tmp_path / path)
    assert latest(tmp_path / path) is None


def test_what_is_on_disk(tmp_path: Path) -> None:
    place = save(tmp_path / "run" / "checkpoints", **state(120))
    assert place == tmp_path / "run" / "checkpoints" / "step-00000120"
    assert names(place) == set(FILES)
    assert names(place.parent) == {"step-00000120", "latest"}
    assert (place.parent / "latest").read_text() == "step-00000120\n"
    assert same(load_file(place / "tensors.safetensors"), state(120)["tensors"])
    assert json.loads((place / "record.json").read_text()) == state(120)["record"]
    manifest = json.loads((place / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 120)
    assert manifest["files"]["record.json"]["size_bytes"] == (place / "record.json").stat().st_size
    assert loaded_state(place) == (120, "")


def test_the_newest_are_kept_and_newest_means_saved_last(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, **state(step), keep=2)
    assert names(tmp_path) == {"step-00000030", "step-00000040", "latest"}
    save(tmp_path, **state(5), keep=2)
    assert names(tmp_path) == {"step-00000005", "step-00000040", "latest"}
    assert loaded_state(tmp_path) == (5, "")
    save(tmp_path, **state(5, "again"), keep=1)
    assert names(tmp_path) == {"step-00000005", "latest"}
    assert loaded_state(tmp_path) == (5, "again")


def test_a_damaged_checkpoint_of_a_higher_step_never_displaces_the_one_just_saved(tmp_path: Path) -> None:
    (save(tmp_path, **state(20)) / "manifest.json").unlink()
    save(tmp_path, **state(10), keep=1)
    with pytest.warns(UserWarning, match=r"step-00000020 cannot be used: .*using step-00000010"):
        load(tmp_path)


@pytest.mark.processes
def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f".step-00000007.{pid}.partial").mkdir()
        (tmp_path / f".step-00000007.{pid}.partial" / "record.json").write_text("{}")
    (tmp_path / f".latest.{dead.pid}.partial").write_text("step-0")
    (tmp_path / f".notes.{dead.pid}.partial").write_text("not ours")
    save(tmp_path, **state(8))
    living, foreign = f".step-00000007.{os.getppid()}.partial", f".notes.{dead.pid}.partial"
    assert names(tmp_path) == {"step-00000008", "latest", living, foreign}


def test_tensors_of_every_kind_come_back_equal(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {f"type {dtype}": torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype) for dtype in DTYPES}
    tensors |= {
        "transposed": flat.reshape(3, 4).t(),
        "strided": flat[::3],
        "expanded": torch.tensor([1.0]).expand(4),
        "overlapping a": flat[:8],
        "overlapping b": flat[4:],
        "the same": flat,
        "one element of a column": flat.reshape(3, 4)[:1, 2:3].t(),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "scalar flag": torch.tensor(True),
        "empty": torch.empty(0),
        "empty 3-d": torch.empty(2, 0, 3, dtype=torch.int64),
        "conjugate": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
        "negated": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "not numbers": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        'a name: ünï/"quotes"': torch.ones(1),
        "longer than one piece": torch.arange(PIECE_BYTES // 4 + 1, dtype=torch.int32),
    }
    loaded, _ = load(save(tmp_path, step=0, tensors=tensors, record={}))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        # repr tells NaN from NaN's absence and −0.0 from 0.0
        assert repr(loaded[name].tolist()) == repr(tensor.tolist()), name
        assert not loaded[name].requires_grad
        assert loaded[name].data_ptr() % tensor.element_size() == 0, name


def test_loaded_tensors_are_private_and_outlive_their_checkpoint(tmp_path: Path) -> None:
    place = save(tmp_path, **state(1))
    tensors, _ = load(place)
    tensors["steps"].add_(1)
    assert loaded_state(place) == (1, "")
    save(tmp_path, **state(2), keep=1)
    assert not place.exists()
    assert tensors["steps"] == 2
    assert torch.equal(tensors["weight"], state(1)["tensors"]["weight"])


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("w", torch.ones(2, dtype=torch.complex128), "its type is complex128; convert it to one of float64"),
        ("w", torch.eye(2).to_sparse(), "sparse_coo"),
        ("w", torch.ones(2, device="meta"), "meta device"),
        ("__metadata__", torch.ones(2), "reserves this name"),
    ],
)
def test_unsavable_tensors_are_refused_by_name(
    name: str, tensor: torch.Tensor, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"tensor '{name}' cannot be saved: .*{reason}"):
        save(tmp_path, step=1, tensors={name: tensor}, record={})
    assert not names(tmp_path)


def test_a_record_comes_back_equal(tmp_path: Path) -> None:
    record = {
        "integers": [0, -1, 2**80],
        "floats": [0.1, 1e-300, -0.0, math.inf, -math.inf],
        "text": 'ünï "q" \n \ud800',
        "nested": {"": [], "none": None, "flags": [True, False], "deep": [[{"x": [1.5]}]]},
    }
    _, loaded = load(save(tmp_path, step=1, tensors={}, record={**record, "nan": math.nan}))
    assert math.isnan(loaded.pop("nan"))
    assert repr(loaded) == repr(record)


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"a": {"betas": (0.9, 0.99)}}, r"record\['a'\]\['betas'\] is a tuple"),
        ({"a": [1, torch.ones(1)]}, r"record\['a'\]\[1\] is a Tensor"),
        ({"a": {1: 2}}, r"record\['a'\] has the key 1, a int"),
        ({"raw": b"x"}, r"record\['raw'\] is a bytes"),
        ({"path": Path("x")}, r"record\['path'\] is a PosixPath"),
        ({"loop": circular()}, "cannot be written as JSON"),
        ({"huge": 10**5000}, "cannot be written as JSON"),
    ],
)
def test_unsavable_records_are_refused_by_key(record: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        save(tmp_path, step=1, tensors={}, record=record)
    assert not names(tmp_path)


@pytest.mark.parametrize(("step", "keep"), [(-1, 3), (1, 0)])
def test_impossible_numbers_are_refused(step: int, keep: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"step {step} and keep {keep}"):
        save(tmp_path, step=step, tensors={}, record={}, keep=keep)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"step 1 could not be saved in .*/file/x: File exists \(.*/file\)"
    ):
        save(tmp_path / "file" / "x", **state(1))
    with pytest.raises(CheckpointError, match=r"weights could not be saved as .*/x.safetensors: File exists"):
        save_weights(tmp_path / "file" / "y" / "x.safetensors", {})


def test_weights_are_a_plain_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "export" / "model.safetensors"
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    save_weights(path, model.state_dict())
    assert same(load_file(path), dict(model.state_dict()))
    assert names(path.parent) == {"model.safetensors"}


@pytest.mark.parametrize("kind", ["kill", "power", "reorder", "full"])
def test_weights_are_old_or_new_after_any_crash(kind: str, tmp_path: Path) -> None:
    old, new = state(1)["tensors"], state(2)["tensors"]
    path = tmp_path / "model.safetensors"
    for crash_at in itertools.count():
        with FaultyDisk() as disk:
            save_weights(path, old, disk=disk)
        with FaultyDisk(crash_at, kind) as disk:
            try:
                save_weights(path, new, disk=disk)
            except (Crash, CheckpointError):
                loaded = load_file(path)
                assert same(loaded, old) or same(loaded, new)
            else:
                disk.lose_unsynced()
                break
    assert crash_at > 0
    assert same(load_file(path), new)
    assert names(tmp_path) == {"model.safetensors"}
