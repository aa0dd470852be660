"""`mh.run` in programs of every kind: from a file without a main guard, a command, standard input, a prompt; ended by
signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import clean_environment, manyhands, run
from tests.faults.test_run import descendants, is_gone, wait_until

TRAIN = """
import sys
import manyhands as mh

def train():
    import torch
    model = torch.nn.Linear(3, 1)
    session = mh.session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
    )
    for batch in session.batches([torch.ones(3)] * 16, batch_size=4):
        session.step(batch)
    return session.rank, session.steps

print("begins here")
"""
PRINT = 'print(mh.run(train, workers=2), "torch" in sys.modules)\n'


@pytest.mark.parametrize("kind", ["file", "command", "standard input", "prompt"])
def test_a_program_of_any_kind_begins_once_and_its_workers_call_the_function(
    kind: str, tmp_path: Path
) -> None:
    program = TRAIN + PRINT
    (tmp_path / "program.py").write_text(program)
    words = {
        "file": ["program.py"],
        "command": ["-c", program],
        "standard input": ["-"],
        "prompt": ["-i", "-q"],
    }
    done = subprocess.run(
        [sys.executable, *words[kind]],
        cwd=tmp_path,
        env=clean_environment(),
        input=program if kind in ("standard input", "prompt") else "",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[(0, 2), (1, 2)] False" in done.stdout
    assert done.stdout.count("begins here") == 1
    assert "epoch 1  step 2  loss" in done.stderr
    assert "Traceback" not in done.stderr


FOREVER = """
import os, time
import manyhands as mh

def forever():
    print("in", os.getpid(), flush=True)
    while True:
        time.sleep(0.1)

try:
    mh.run(forever, workers=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(mh.run(mh.rank, workers=2), open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
"""


def started(folder: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    """The program, and the processes below it when its workers run."""
    (folder / "program.py").write_text(FOREVER)
    program = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert program.stdout
    for _ in range(2):
        assert " in " in program.stdout.readline()
    return program, descendants(program.pid)[1:]


def test_an_interrupt_ends_the_run_and_the_program_goes_on(tmp_path: Path) -> None:
    program, below = started(tmp_path)
    program.send_signal(signal.SIGINT)
    out, _ = program.communicate(timeout=60)
    assert out.splitlines()[0] == "interrupted"
    assert out.splitlines()[-1] == "[0, 1] "
    assert program.returncode == 0
    assert all(map(is_gone, below))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_ended_leaves_no_worker(number: signal.Signals, tmp_path: Path) -> None:
    program, below = started(tmp_path)
    assert len(below) >= 4, "two workers, the coordinator and the shell that guards them"
    os.kill(program.pid, number)
    program.communicate(timeout=60)
    assert program.returncode == -number
    assert wait_until(lambda: all(map(is_gone, below)))


def test_a_launched_script_is_a_worker_already(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TRAIN + PRINT)
    done = manyhands("launch", "program.py", cwd=tmp_path)
    assert done.code == 2
    assert "call the function itself here, or start the program as `python program.py`" in done.err


def test_another_process_joins_the_run_of_a_program(tmp_path: Path) -> None:
    program = """
import time
import manyhands as mh
import torch

def train():
    model = torch.nn.Linear(3, 1)
    session = mh.session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
    )
    print("here", flush=True)
    while session.epoch < 60:
        for batch in session.batches([torch.ones(3)] * 16, batch_size=4):
            session.step(batch)
            time.sleep(0.02 if session.workers == 3 else 0.5)  # until the third is there
    return session.rank

print(mh.run(train, workers="2:3", out="run"))
"""
    (tmp_path / "program.py").write_text(program)
    first = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert first.stdout
    assert "here" in first.stdout.readline()
    joined = manyhands("launch", "--join", "run", cwd=tmp_path)
    out, err = first.communicate(timeout=60)
    assert (joined.code, first.returncode) == (0, 0), joined.err + err
    assert out.splitlines()[-1] == "[0, 1, 2]"


def test_what_a_program_has_beside_it_is_found_by_its_workers(tmp_path: Path) -> None:
    """Modules beside the program, its words, and what it has said to PyTorch."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "beside.py").write_text("def value():\n    return 5\n")
    (folder / "program.py").write_text(
        "import sys, torch, beside\nimport manyhands as mh\n"
        "torch.set_default_dtype(torch.float64)\n"
        "def work():\n    return beside.value(), sys.argv[1:], str(torch.ones(1).dtype)\n"
        "print(mh.run(work, workers=1), mh.run(beside.value, workers=1))\n"
    )
    done = run([sys.executable, "there/program.py", "--lr", "1"], tmp_path)
    assert done.code == 0, done.err
    assert done.out == "[(5, ['--lr', '1'], 'torch.float64')] [5]\n"
