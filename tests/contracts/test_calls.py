"""`mh.run`: a function of this process in several workers; what it returns, what it refuses, what it leaves behind."""

import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.errors import ManyhandsError, MemoryShort, RunFailed, UsageError
from manyhands.launching import call

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def session(**settings: Any) -> mh.Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), squared, **settings)


def trained(made: mh.Session, epochs: int) -> None:
    while made.epoch < epochs:
        for batch in made.batches([torch.ones(3)] * 16, batch_size=4):
            made.step(batch)


def test_values_come_back_by_rank_from_a_closure_and_again(tmp_path: Path) -> None:
    class Found:  # defined where no other process can import it
        def __init__(self, rank: int) -> None:
            self.rank = rank

    epochs, noted = 2, []

    def train(word: str) -> Any:
        made = session()
        trained(made, epochs)
        noted.append(word)
        state = made.engine.training.model.state_dict()
        model = made.engine.training.model
        return Found(made.rank), word, state, model, state["0.weight"].numpy(), noted

    results = mh.run(train, "word", workers=2, out=tmp_path / "mine")
    assert [found.rank for found, *_ in results] == [0, 1]
    assert noted == []
    for found, word, state, model, array, theirs in results:
        assert isinstance(found, Found)
        assert (word, theirs) == ("word", ["word"])
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
        assert all(torch.equal(value, results[0][2][name]) for name, value in state.items())
        assert all(value.any() for value in state.values())
        assert np.array_equal(array, state["0.weight"].numpy())
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in state.values())
    assert results.summary["steps"] == 4
    assert (results.out / "summary.json").exists()
    assert results.out == tmp_path / "mine"
    assert mh.run(lambda number: number + mh.rank(), 5, workers=3) == [5, 6, 7]
    assert mh.run(functools.partial(divmod, 7), 2, workers=1) == [(3, 1)]
    assert mh.run("a,b".split, ",") == [["a", "b"]] * 2


def model_after(epochs: int) -> Any:
    made = session()
    trained(made, epochs)
    return made.model_state()


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "parameter-server:sync", "servers": 1},
        {"placement": "pipeline:stages=2,microbatches=2"},
        {"strategy": "all-reduce:topology=ring"},
    ],
    ids=str,
)
def test_every_way_of_distributing_learns_the_same(settings: dict[str, Any]) -> None:
    (alone,) = mh.run(model_after, 1, workers=1)
    results = mh.run(model_after, 2 if "placement" not in settings else 1, workers=2, **settings)
    assert len(results) == 2
    for state in results:
        assert state.keys() == alone.keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    if "placement" in settings:
        for name, value in alone.items():
            torch.testing.assert_close(results[0][name], value)


def test_a_dead_worker_is_replaced_by_one_that_calls_the_function(tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def train() -> Any:
        made = session()
        while made.epoch < 60:
            for batch in made.batches([torch.ones(3)] * 16, batch_size=4):
                made.step(batch)
                if made.rank == 1 and made.steps == 20 and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait(0.02 if made.workers == 2 else 0.5)  # until the other one is there
        return made.rank, made.steps

    results = mh.run(train, workers=2, out=tmp_path / "run")
    assert killed.exists()
    assert [rank for rank, _ in results] == [0, 1]
    launcher = (tmp_path / "run" / "events" / "launcher.jsonl").read_text()
    assert '"kind":"death"' in launcher
    assert '"kind":"join"' in launcher


def test_an_exception_is_said_once_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> int:
        trained(session(), 1)
        if mh.rank() == 1:
            raise ValueError("no good")
        return 1

    with pytest.raises(RunFailed) as caught:
        mh.run(train, workers=2)
    assert str(caught.value).startswith("worker 1 of 2 ended with ValueError: no good\n\nTraceback")
    assert str(caught.value).count("ValueError: no good") == 2
    assert (caught.value.worker, "in train" in caught.value.traceback) == (1, True)
    assert "copied.py" not in caught.value.traceback
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    with pytest.raises(RunFailed, match=r"worker . of 2 died: exit code 3"):
        mh.run(sys.exit, 3)
    with pytest.raises(
        RunFailed, match=r"workers 0, 1 returned nothing, not even None: the function left by sys"
    ):
        mh.run(sys.exit, 0)


def train_alone() -> int:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    squared(model, torch.ones(2, 3)).backward()
    optimizer.step()
    return mh.rank()


def test_workers_that_train_without_a_session_are_refused_and_what_they_return_is_kept() -> None:
    with pytest.raises(
        RunFailed, match=r"2 workers have trained, each alone: .*session = mh.session"
    ) as caught:
        mh.run(train_alone)
    assert caught.value.results == [0, 1]


def test_what_cannot_come_back_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"worker \d returned a generator that cannot be copied to here \(TypeError"
    ):
        mh.run(lambda: (number for number in range(3)))


model_here = nn.Linear(3, 1)


def test_a_model_of_this_process_stays_as_it_was_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    before = model_here.weight.clone()
    mine = nn.Linear(3, 1)

    def train() -> None:
        with torch.no_grad():
            mine.weight.zero_()

    mh.run(train)
    assert mine.weight.any()
    assert "the model here is as it was before" in capsys.readouterr().err
    mh.run(lambda: mine.weight)
    assert "as it was before" not in capsys.readouterr().err
    assert torch.equal(before, model_here.weight)


def learn(data: Any, rate: float = 0.1) -> None:
    """Has an argument that must be given."""


def generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("given", "settings", "sentence"),
    [
        (3, {}, "3 is none; give the function without calling it"),
        (generator, {}, "a generator or a coroutine"),
        (mh.rank, {"worker": 2}, "unknown setting 'worker'; known: .*; did you mean workers?"),
        (mh.rank, {"lr": 0.1}, "unknown setting 'lr'"),
        (
            learn,
            {},
            "cannot be called with the 0 arguments .*: missing a required argument: 'data'; give arguments",
        ),
        (learn, {"rate": 0.1}, "no setting 'rate', which is an argument of learn; bind it .*partial"),
        (mh.rank, {"workers": 0}, "workers=0: it must be at least 1"),
        (mh.rank, {"workers": "two"}, "workers='two': 'two' is neither a number nor a range"),
        (mh.rank, {"servers": 1.5}, "servers=1.5: it must be a whole number"),
        (mh.rank, {"servers": 1}, "servers"),
        (mh.rank, {"strategy": "ddp"}, "did you mean"),
        (mh.rank, {"workers": 100_000}, "workers=100000: this host has .*use workers="),
        (threading.Lock().acquire, {}, "cannot be copied to the workers .*make that inside the function"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    given: Any, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        mh.run(given, **settings)
    assert "--" not in str(caught.value)
    assert not Path("runs").exists()


def test_no_run_begins_in_a_thread_in_a_worker_or_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[ManyhandsError] = []

    def try_it() -> None:
        try:
            mh.run(mh.rank)
        except ManyhandsError as error:
            refused.append(error)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join()
    assert "has to be called from the main thread" in str(refused[0])
    with pytest.raises(UsageError, match=r"this process is worker \d of a run of 2 processes already"):
        mh.run(lambda: mh.run(mh.rank))
    monkeypatch.setattr(call, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryShort, match="load the data inside the function"):
        mh.run(lambda data: 1, b"1" * 1000)


CHILD = """
import torch
import manyhands as mh

print(mh.rank())
model = torch.nn.Linear(3, 1)
for use in (
    lambda: mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: 0.0),
    lambda: mh.main_process_first().__enter__(),
):
    try:
        use()
    except mh.ManyhandsError as error:
        print(error)
"""


def test_what_a_worker_starts_is_no_worker() -> None:
    def train() -> tuple[str, str, bool]:
        made = session()
        trained(made, 1)
        command = [
            sys.executable,
            "-c",
            CHILD,
        ]  # with the worker's environment, as a spawned process of a Pool
        started = subprocess.run(command, capture_output=True, text=True).stdout
        hear, tell = os.pipe()
        if (pid := os.fork()) == 0:
            for use in (lambda: made.step(torch.ones(2, 3)), made.close, made.barrier, session):
                try:
                    use()
                except ManyhandsError as error:
                    os.write(tell, f"{error}\n".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        forked = os.read(hear, 1 << 16).decode()
        os.close(hear)
        os.close(tell)
        trained(made, 2)  # which none of them has disturbed
        return started, forked, made.steps == 4

    for rank, (started, forked, is_right) in enumerate(mh.run(train, workers=2)):
        sentence = f"this process was started by worker {rank}, "
        first, *others = started.splitlines()
        assert first == str(rank)
        assert [line.startswith(sentence) for line in others] == [True] * 2
        assert [line.startswith(sentence) for line in forked.splitlines()] == [True] * 4
        assert '`if __name__ == "__main__":`' in others[0]
        assert is_right
