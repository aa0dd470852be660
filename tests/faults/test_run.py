"""Runs that end badly: the right one is named, and the machine is as it was before."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.commands import BIN, clean_environment, last_error, manyhands

LONG_S = 60.0
LISTENING = "0A"


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def descendants(pid: int) -> list[int]:
    """The process and everything that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += descendants(int(child))
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def open_files(pid: int) -> dict[str, int]:
    """Where the descriptors of a process lead, with the inode behind each."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found[os.readlink(link)] = link.stat().st_ino
    return found


def shared_memory(pids: list[int]) -> set[int]:
    """The inodes of the anonymous memory that these processes hold, open or mapped."""
    inodes = set()
    for pid in pids:
        inodes |= {inode for place, inode in open_files(pid).items() if "memfd:" in place}
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:" in line:
                    inodes.add(int(line.split()[4]))
    return inodes


def all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def listening(pid: int) -> set[str]:
    """The addresses on which this very process accepts TCP connections."""
    own = {place for place in open_files(pid) if place.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                address, state, inode = (line.split()[column] for column in (1, 3, 9))
                if state == LISTENING and f"socket:[{inode}]" in own:
                    found.add(address)
    return found


def test_a_listening_socket_would_be_seen() -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout
        process.stdout.readline()
        assert len(listening(process.pid)) == 1
        process.communicate()


class Running:
    """A training run in full swing."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.out = folder / "run"
        command = [str(BIN / "manyhands"), "train", "--model", "mlp", "--steps", "100000000", "--out", "run"]
        command += more
        self.launcher = subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.workers: dict[int, int] = {}
        self.processes = [self.launcher.pid]

    def wait_for_steps(self) -> None:
        """Until both workers have finished steps; then everything that a run ever opens is open."""
        assert wait_until(lambda: self.launcher.poll() is not None or len(self.stepping()) == 2)
        assert self.launcher.poll() is None, self.said()
        self.processes = descendants(self.launcher.pid)
        for pid in self.processes:
            with contextlib.suppress(OSError):
                kind, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
                if kind in ("worker", "server"):
                    self.workers[int(number) + (2 if kind == "server" else 0)] = pid
        assert set(self.workers) >= {0, 1}  # servers come after them

    def stepping(self) -> list[Path]:
        return [
            path for path in self.out.glob("events/worker-*.jsonl") if '"kind":"step"' in path.read_text()
        ]

    def said(self) -> str:
        """What the launcher said on standard error, when it has ended."""
        _, error = self.launcher.communicate(timeout=LONG_S)
        return error

    def all_gone(self) -> bool:
        return wait_until(lambda: all(is_gone(pid) for pid in self.processes))

    def close(self) -> None:
        for pid in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if self.launcher.poll() is None or pid != self.launcher.pid:
                    os.kill(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.communicate()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with leaving_nothing(tmp_path) as run:
        yield run


@contextlib.contextmanager
def leaving_nothing(folder: Path, *more: str) -> Iterator[Running]:
    """A run that opens no port, and of which nothing is left afterwards, however it ends."""
    files_before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    run = Running(folder, *more)
    try:
        run.wait_for_steps()
        memory = shared_memory(run.processes)
        assert memory, "the workers share memory, or this test sees nothing"
        assert [listening(pid) for pid in run.processes] == [set()] * len(run.processes)
        yield run
        assert run.all_gone()
        assert not memory & shared_memory(all_processes())
        if files_before:
            assert not {name for name in set(os.listdir("/dev/shm")) - files_before if "manyhands" in name}
    finally:
        run.close()


@pytest.mark.parametrize(
    ("number", "code", "to_group"),
    [
        (signal.SIGINT, 130, True),  # as a terminal sends Ctrl-C: to the whole foreground group
        (signal.SIGTERM, 75, False),
        (signal.SIGKILL, -signal.SIGKILL, False),
    ],
)
def test_a_launcher_that_is_ended_leaves_nothing(
    number: signal.Signals, code: int, to_group: bool, running: Running
) -> None:
    assert len(running.processes) >= 3
    if to_group:
        os.killpg(running.launcher.pid, number)
    else:
        running.launcher.send_signal(number)
    error = running.said()
    assert running.launcher.returncode == code
    assert "Traceback" not in error
    if number == signal.SIGINT:
        assert re.fullmatch(
            r"stopped by Ctrl-C in step \d+; (no checkpoint|the newest checkpoint is step-\d+, manyhands train "
            r"--out run --resume goes on with it); run in run",
            error.splitlines()[-1],
        )


def test_a_worker_that_is_killed_is_named_and_replaced(running: Running) -> None:
    os.kill(running.workers[1], signal.SIGKILL)
    told = running.out / "events" / "launcher.jsonl"
    assert wait_until(lambda: told.exists() and '"join"' in told.read_text())
    death, join = (json.loads(line) for line in told.read_text().splitlines())
    assert (death["kind"], death["rank"], death["pid"]) == ("death", 1, running.workers[1])
    assert (join["kind"], join["rank"]) == ("join", 2)
    assert not is_gone(running.workers[0]), "the other one has gone on"
    running.processes = descendants(running.launcher.pid)
    running.launcher.send_signal(signal.SIGTERM)
    error = running.said()
    assert running.launcher.returncode == 75
    assert "worker 1 died (killed by SIGKILL): noticed after" in error
    assert "Traceback" not in error
    # What the killed worker had recorded is there to be read, up to its last whole line.
    records = (running.out / "events" / "worker-1.jsonl").read_text().split("\n")[:-1]
    assert json.loads(records[-1])["rank"] == 1


FAILING = """
import itertools, sys, time
import torch
import manyhands as mh

def loss(model, batch):
    return model(batch).mean()

def deep_inside():
    raise RuntimeError("the user's own mistake")

mode = sys.argv[1]
model = torch.nn.Linear(2, 1)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
rank = session.rank
count = 4 if mode == "last" else 1_000_000_000
for number, batch in enumerate(session.batches(itertools.repeat(torch.ones(4, 2), count))):
    session.step(batch)
    if number == 3 and (mode == "both" or mode == "one" and rank == 1):
        deep_inside()
    if number == 3 and mode == "exit" and rank == 1:
        sys.exit(3)
if rank == 1:
    time.sleep(0.5)  # worker 0 is at its end and waits for this one
    deep_inside()
"""


@pytest.mark.parametrize(("mode", "ranks"), [("one", [1]), ("both", [0, 1]), ("last", [1])])
def test_an_exception_in_the_users_script_is_shown_once(mode: str, ranks: list[int], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    done = manyhands("launch", "--workers", "2", "script.py", mode, cwd=tmp_path)
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1
    assert done.err.count("RuntimeError: the user's own mistake") == 2, "as it happened, and in the last line"
    assert "manyhands/cluster" not in done.err, "only the user's own frames"
    lines = done.err.splitlines()
    blame = last_error(done.err)
    cause = lines[lines.index(blame) - 1]
    assert cause == "RuntimeError: the user's own mistake"
    assert blame in [
        f"error: worker {rank} of 2 ended with RuntimeError: the user's own mistake" for rank in ranks
    ]


MISTAKES = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Model(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.net = nn.Linear(64, classes)

    def forward(self, inputs):
        return self.net(self.flatten(inputs))

    def flatten(self, inputs):
        return inputs.reshape(7, -1)

class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40:
            raise OSError("sample 40 cannot be read")
        return torch.zeros(1, 8, 8), index % 10

def data():
    return Data(), Data()
"""


@pytest.mark.parametrize(
    ("flags", "last_frame", "cause"),
    [
        (
            ["--model", "mine:Model"],
            "return inputs.reshape(7, -1)",
            "RuntimeError: shape '[7, -1]' is invalid",
        ),
        (["--data", "mine:data"], "raise OSError(", "OSError: sample 40 cannot be read"),
        (
            ["--model", "mine:Model", "--strategy", "hogwild"],
            "return inputs.reshape(7, -1)",
            "RuntimeError: shape",
        ),
        (
            ["--model", "mine:Model", "--strategy", "parameter-server:async", "--servers", "1"],
            "return inputs.reshape(7, -1)",
            "RuntimeError: shape",
        ),
    ],
    ids=["model", "data", "hogwild", "servers"],
)
def test_a_mistake_in_ones_own_model_or_data_is_shown_once_from_ones_own_code_on(
    flags: list[str], last_frame: str, cause: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MISTAKES)
    done = manyhands("train", "--out", "run", *flags, cwd=tmp_path)
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1
    trace = done.err.partition("Traceback (most recent call last):")[2]
    frames = [line for line in trace.splitlines() if line.startswith("  File ")]
    assert "mine.py" in frames[0]
    assert "mine.py" in frames[-1]
    assert last_frame in trace
    assert last_error(done.err).startswith("error: worker ")
    assert f" of 2 ended with {cause}" in last_error(done.err)
    assert "worker 2" not in done.err


def test_a_script_that_leaves_in_one_worker_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    done = manyhands("launch", "--workers", "2", "script.py", "exit", cwd=tmp_path)
    assert done.code == 3
    assert "Traceback" not in done.err
    assert last_error(done.err) == "error: worker 1 of 2 died: exit code 3"
