"""The process that writes a checkpoint is killed at every operation: what was reported complete is never lost."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands import checkpoint
from manyhands.checkpoint import background_write, record_file, tensor_file
from manyhands.cluster.worker.world import World
from tests.contracts.test_checkpoint import (
    Scenario,
    check_after_crash,
    check_next_save,
    every_scenario,
    fresh,
    state,
)
from tests.contracts.test_saving import train
from tests.contracts.test_sessions import make_session
from tests.threads import in_threads

ROOT = Path(__file__).parents[2]
NEVER = 10_000

Write = Callable[..., tuple[int, int]]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Write]:
    """Write a checkpoint in a process that is killed at an operation; its exit code and the operations made."""
    contents = tmp_path_factory.mktemp("contents")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.killing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:

        def one(
            directory: Path, step: int, variant: str, keep: int, at: int = NEVER, half: bool = False
        ) -> tuple[int, int]:
            given = state(step, variant)
            tensors = b"".join(tensor_file.encode(given["tensors"]))
            record = record_file.encode(given["record"])
            content = contents / f"{step}-{variant}"
            content.write_bytes(tensors + record)
            assert process.stdin
            assert process.stdout
            words = (
                directory,
                content,
                len(tensors),
                len(record),
                step,
                keep,
                at,
                "half" if half else "whole",
            )
            process.stdin.write(" ".join(map(str, words)) + "\n")
            process.stdin.flush()
            code, made, *error = process.stdout.readline().split()
            assert not error
            return int(code), 0 if made == "-" else int(made)

        yield one
        assert process.stdin
        process.stdin.close()
    assert process.returncode == 0


def before(scenario: Scenario, directory: Path, write: Write) -> Path:
    for step, variant in scenario.complete:
        assert write(directory, step, variant, keep=9)[0] == 0
    return directory


@every_scenario
def test_killed_before_and_in_the_middle_of_every_operation(
    scenario: Scenario, tmp_path: Path, write: Write
) -> None:
    start = before(scenario, tmp_path / "before", write)
    step, variant = scenario.crashing
    code, total = write(fresh(start, tmp_path / "copy"), step, variant, scenario.keep)
    assert (code, total >= 12) == (0, True)
    for at in range(total):
        for half in (False, True):
            directory = fresh(start, tmp_path / "copy")
            code, _ = write(directory, step, variant, scenario.keep, at=at, half=half)
            assert code == -9, "the fault fired"
            check_after_crash(scenario, directory)
    check_next_save(directory, scenario.keep)


START = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
sys.path.insert(0, {root!r})
from pathlib import Path
import msgspec
from manyhands.checkpoint import writer
from tests.faults.killing import KillingDisk
disk = KillingDisk({at}, half={half})
result = writer.write(msgspec.json.decode(sys.argv[1], type=writer.Job), Path(sys.argv[2]), disk=disk)
Path({count!r}).write_text(str(disk.operations))
sys.stdout.buffer.write(msgspec.json.encode(result))
"""


def test_a_session_whose_writer_is_killed_at_every_operation_never_loses_what_it_was_told_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    count = tmp_path / "count"
    directory = tmp_path / "checkpoints"

    def start(at: int) -> str:
        return START.format(root=str(ROOT), at=at, half=at % 2 == 0, count=str(count))

    def work(world: World) -> list[int]:
        session = make_session(world)
        complete = []
        at = 0
        while not count.exists():
            train(session, 1)
            monkeypatch.setattr(background_write, "_START", start(at))
            session.save(directory, keep=2)
            is_saved = session.engine.saver.outcome() == ""
            complete += [session.steps] if is_saved else []
            if complete:
                assert checkpoint.load(directory)[1]["steps"] in {complete[-1], session.steps}
            # Every other time, one save comes through.
            if not is_saved and at % 2:
                train(session, 1)
                monkeypatch.setattr(background_write, "_START", start(NEVER))
                session.save(directory, keep=2)
                assert session.engine.saver.outcome() == ""
                complete.append(session.steps)
                count.unlink()
            at += 1
        session.close()
        return [at, *complete]

    ((at, *complete),) = in_threads(1, work, timeout_s=100)
    assert at > 12, "every operation was tried"
    assert len(complete) > at // 2
    assert capfd.readouterr().err.count("the process that wrote it was killed by SIGKILL") == at - 1
