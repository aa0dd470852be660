"""Saving while training goes on: what is saved is the state of that step, and what goes wrong is told."""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from manyhands import checkpoint
from manyhands.checkpoint import background_write
from manyhands.cluster.worker.world import World
from manyhands.engine import saver
from manyhands.engine.session import Session
from manyhands.errors import CheckpointError
from tests.contracts.test_sessions import Numbered, make_session
from tests.end_to_end.commands import manyhands, run
from tests.threads import in_threads

pytestmark = pytest.mark.processes

ONLY_SMALL_FILES = (
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); " + background_write._START
)
"""A disk on which the tensors do not find room."""


def wait_for(path: Path) -> str:
    """A process that does not begin before there is such a file."""
    return (
        f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.01)\n"
        + background_write._START
    )


def syncing_after(path: Path) -> str:
    """A process that stands still with files half written until there is such a file."""
    slow = (
        f"import os, time\ndef wait(disk, _):\n  while not os.path.exists({str(path)!r}): time.sleep(0.01)\n"
    )
    patch = "from manyhands.checkpoint.disk import Disk; Disk.sync = wait; "
    start = background_write._START.replace("from manyhands", f"{patch}from manyhands")
    return slow + start


def train(session: Session, steps: int) -> None:
    batches = session.batches(Numbered(500), batch_size=4)
    for _, batch in zip(range(steps), batches, strict=False):
        session.step(batch)
    batches.close()


def model_of(session: Session) -> dict[str, Tensor]:
    return {f"model/{name}": value.clone() for name, value in session.model.state_dict().items()}


def saved_model(directory: Path) -> dict[str, Tensor]:
    return {name: value for name, value in checkpoint.load(directory)[0].items() if name.startswith("model/")}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd:period=2", "hogwild", "parameter-server:sync"])
def test_training_goes_on_while_the_state_of_that_step_is_written(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_write, "_START", wait_for(tmp_path / "go"))

    def work(world: World) -> dict[str, Tensor]:
        session = make_session(world, strategy)
        train(session, 2)
        session.save(tmp_path / "checkpoints")
        then = model_of(session)
        world.host.barrier()  # some do not wait for anybody, and change what all have
        train(session, 3)
        world.host.barrier()
        if world.rank == 0:
            assert list((tmp_path / "checkpoints").iterdir()) == [], "nothing can be written yet"
            (tmp_path / "go").touch()
        session.close()
        assert not same(then, model_of(session))
        return then

    first = in_threads(3, work, strategy=strategy)[0]
    assert same(saved_model(tmp_path / "checkpoints"), first)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000002", "latest"}


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        background_write, "_START", "import time; time.sleep(0.3); " + background_write._START
    )

    def work(world: World) -> None:
        session = make_session(world)
        for _ in range(3):
            train(session, 1)
            session.save(tmp_path, keep=2, wait=session.steps == 3)
            expected = {1: 0, 2: 1, 3: 2}[session.steps]
            assert len(list(tmp_path.glob("step-*"))) == expected

    in_threads(1, work)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000003", "latest"}


def killed(session: Session) -> None:
    writing, _ = session.engine.saver.writing or (None, None)
    if writing is not None:
        os.kill(writing._process.pid, signal.SIGKILL)


def untouched(session: Session) -> None:
    pass


@pytest.mark.parametrize(
    ("start", "harm", "reason"),
    [
        (ONLY_SMALL_FILES, untouched, "File too large"),
        ("import time; time.sleep(60)", killed, "the process that wrote it was killed by SIGKILL"),
        ("raise SystemExit(3)", untouched, "the process that wrote it ended with code 3"),
    ],
)
def test_a_failed_write_is_told_at_once_and_harms_nothing(
    start: str,
    harm: Callable[[Session], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    good = background_write._START

    def work(world: World) -> None:
        session = make_session(world)
        session.save(tmp_path, wait=True)
        train(session, 1)
        world.host.barrier()
        monkeypatch.setattr(background_write, "_START", start)
        world.host.barrier()
        session.save(tmp_path)
        harm(session)
        while (
            world.rank == 0 and session.engine.saver.writing and not session.engine.saver.writing[0].is_over()
        ):
            pass
        train(session, 1)  # and hears of it
        world.host.barrier()
        if world.rank == 0:
            said = capfd.readouterr().err
            assert said.startswith("warning: step 2: step 1 could not be saved in")
            assert reason in said
            assert said.endswith("the checkpoints before it are unharmed\n")
        assert checkpoint.load(tmp_path)[1]["steps"] == 0
        with pytest.raises(CheckpointError, match="step 2 could not be saved"):
            session.save(tmp_path, wait=True) if harm is untouched else killed_while_waiting(session)
        session.engine.replica.let_go()  # the hooks of a session that failed hold the host's memory
        monkeypatch.setattr(background_write, "_START", good)

    def killed_while_waiting(session: Session) -> None:
        session.save(tmp_path)
        killed(session)
        session.close()

    in_threads(2, work)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000000", "latest"}


def test_a_later_save_makes_up_for_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(world: World) -> None:
        session = make_session(world)
        with monkeypatch.context() as patch:
            patch.setattr(background_write, "_START", ONLY_SMALL_FILES)
            session.save(tmp_path)
        train(session, 1)
        session.save(tmp_path)
        session.close()

    in_threads(1, work)
    assert checkpoint.load(tmp_path)[1]["steps"] == 1


def test_the_last_save_must_not_fail_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_write, "_START", ONLY_SMALL_FILES)

    def work(world: World) -> str:
        session = make_session(world)
        session.save(tmp_path)
        with pytest.raises(CheckpointError) as failed:
            session.close()
        return str(failed.value)

    one, two = in_threads(2, work)
    assert one == two
    assert "step 0 could not be saved" in one


@pytest.mark.parametrize("strategy", ["all-reduce", "gossip"])
def test_without_memory_the_copy_is_made_in_a_file(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saver, "available_bytes", lambda: 100)

    def work(world: World) -> dict[str, Tensor]:
        session = make_session(world, strategy)
        train(session, 2)
        session.save(tmp_path)
        then = model_of(session)
        session.close()
        return then

    first, *_ = in_threads(3, work)
    assert same(saved_model(tmp_path), first)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "latest"}
    said = capfd.readouterr().err
    assert said.count("saving needs 0.00 GB for a copy of the state") == 1
    assert f"the copy is made in a file in {tmp_path}" in said


def test_memory_of_the_copy_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_write, "_START", wait_for(tmp_path / "go"))

    def has_copy(world: World) -> bool:
        try:
            return os.lseek(world.host.arena.fd, saver._PLACE, os.SEEK_DATA) >= saver._PLACE
        except OSError:
            return False

    def work(world: World) -> tuple[bool, bool]:
        session = make_session(world)
        session.save(tmp_path)
        before = has_copy(world)
        (tmp_path / "go").touch()
        session.close()
        return before, has_copy(world)

    assert in_threads(2, work)[0] == (True, False)


def test_several_sessions_save_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_write, "_START", wait_for(tmp_path / "go"))

    def work(world: World) -> list[dict[str, Tensor]]:
        sessions = [make_session(world), make_session(world)]
        then = []
        for steps, session in enumerate(sessions, 1):
            train(session, steps)
            session.save(tmp_path / f"checkpoints-{steps}")
            then.append(model_of(session))
        world.host.barrier()
        (tmp_path / "go").touch()
        for session in sessions:
            session.close()
        return then

    one, two = in_threads(2, work)[0]
    assert not same(one, two)
    assert same(saved_model(tmp_path / "checkpoints-1"), one)
    assert same(saved_model(tmp_path / "checkpoints-2"), two)


def test_what_is_sent_to_every_process_of_a_job_does_not_end_the_one_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_write, "_START", syncing_after(tmp_path / "go"))

    def work(world: World) -> str | None:
        session = make_session(world)
        session.save(tmp_path / "checkpoints")
        writing, _ = session.engine.saver.writing or pytest.fail("nothing is being written")
        while not list((tmp_path / "checkpoints").glob(".step-*")):
            assert not writing.is_over()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(writing._process.pid, number)
        (tmp_path / "go").touch()
        return session.engine.saver.outcome()

    assert in_threads(1, work) == [""]


def test_every_random_state_goes_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(numpy.random.rand()), random.gauss(0, 1)]

    def work(world: World, resumes: bool) -> list[float]:
        session = make_session(world)
        if resumes:
            torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
            assert session.resume(tmp_path) == {}
        else:
            draw()
            session.save(tmp_path, wait=True)
        return draw()

    (before,) = in_threads(1, lambda world: work(world, resumes=False))
    (after,) = in_threads(1, lambda world: work(world, resumes=True))
    assert after == before


SCRIPT = """
import sys
import torch
import manyhands as mh
from manyhands.checkpoint import background_write

if "fail" in sys.argv:
    background_write._START = "raise SystemExit(3)"
model = torch.nn.Linear(8, 8)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
for number, batch in enumerate(session.batches([torch.ones(4, 8)] * 3)):
    session.step(batch)
    session.save()
    if number == 2 and "raise" in sys.argv:
        raise RuntimeError("an error of one's own")
"""


@pytest.mark.parametrize(
    ("mode", "code", "last", "kept"),
    [
        ("well", 0, "", ["step-00000001", "step-00000002", "step-00000003"]),
        ("fail", 2, "error: step 3 could not be saved in", []),
        ("raise", 1, "error: worker", ["step-00000001", "step-00000002"]),
    ],
)
def test_the_end_of_a_script_waits(mode: str, code: int, last: str, kept: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = manyhands("launch", "--workers", "2", "--out", "run", "script.py", mode, cwd=tmp_path)
    assert done.code == code, done.err
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert [line[: len(last)] for line in lines] == ([last] if last else [])
    assert set(kept) <= {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert not list((tmp_path / "run" / "checkpoints").glob(".*")) or mode == "raise"


def test_a_script_alone_that_cannot_save_says_so_and_fails(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("session.save()", 'session.save("here")'))
    done = run([sys.executable, "script.py", "fail"], tmp_path)
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("error: step 3 could not be saved in here")
    assert "Traceback" not in done.err
