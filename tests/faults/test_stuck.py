"""A worker that does not come to the next step: it is named with its line, a run that is told to end does end, and a
worker that only computes in C is left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from manyhands.cluster.launcher import kernel_view, stack
from manyhands.cluster.launcher.kernel_view import Silences
from manyhands.cluster.launcher.stack import Doing
from tests.end_to_end.commands import BIN, Done, clean_environment
from tests.faults.test_run import descendants, is_gone, wait_until

PACKAGE = Path(kernel_view.__file__).parents[2]

HEAD = """
import ctypes, subprocess, time
import torch
import manyhands as mh

data = [(torch.ones(3), torch.ones(1)) for _ in range(64)]
model = torch.nn.Linear(3, 1)

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
for batch in session.batches(data, batch_size=8):
    session.step(batch)
"""

# A lock, a dead file system, a deadlocked loader.
SLEEPS = """
def train():
    while session.rank == 0:
        time.sleep(1)
train()
for batch in session.batches(data, batch_size=8):
    session.step(batch)
"""

BUSY_IN_C = """
if session.rank == 0:
    print("holds the lock", flush=True)
    ends = subprocess.Popen(["sleep", "6"], stdout=subprocess.PIPE).stdout.fileno()
    ctypes.PyDLL(None).read(ends, ctypes.create_string_buffer(1), 1)  # a call that keeps the interpreter's lock
for batch in session.batches(data, batch_size=8):
    session.step(batch)
print("ended as one of", session.workers, flush=True)
"""


class Stuck:
    """A run whose script is `HEAD` and something more."""

    def __init__(self, process: "subprocess.Popen[str]", run: Path) -> None:
        self.process = process
        self.run = run

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run / "events" / "launcher.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def is_at_work(self) -> bool:
        paths = [self.run / "events" / f"worker-{rank}.jsonl" for rank in (0, 1)]
        return all(path.exists() and path.read_text().count('"kind":"step"') >= 4 for path in paths)

    def end(self) -> Done:
        out, err = self.process.communicate(timeout=60)
        return Done(code=self.process.returncode, out=out, err=err)


@contextmanager
def launched(folder: Path, body: str, stall_s: float) -> Iterator[Stuck]:
    (folder / "script.py").write_text(HEAD + body)
    command = [str(BIN / "manyhands"), "launch", "--workers", "2", "--out", "run", "script.py"]
    environ = clean_environment(MANYHANDS_STALL_S=str(stall_s))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environ, **pipes) as process:
        everyone = [process.pid]
        try:
            yield Stuck(process, folder / "run")
        finally:
            everyone = descendants(process.pid)
            for pid in everyone:
                if not is_gone(pid):
                    os.kill(pid, signal.SIGKILL)


WHERE = "worker 1 waits for worker 0, which is at script.py:{line} in train: time.sleep(1)"
SLEEPING_LINE = (HEAD + SLEEPS).splitlines().index("        time.sleep(1)") + 1


def test_one_sigterm_ends_a_run_with_a_stuck_worker_and_the_others_save(tmp_path: Path) -> None:
    with launched(tmp_path, SLEEPS, stall_s=3) as stuck:
        assert wait_until(stuck.is_at_work)
        began_s = time.monotonic()
        stuck.process.send_signal(signal.SIGTERM)
        done = stuck.end()
        assert time.monotonic() - began_s < 20
    assert WHERE.format(line=SLEEPING_LINE) in done.err
    assert done.code == 75, done.err
    assert "told to end by SIGTERM: the run is saved" in done.err
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_who_waits_for_whom_is_said_without_a_signal_and_once_more_at_an_interrupt(tmp_path: Path) -> None:
    with launched(tmp_path, SLEEPS, stall_s=1) as stuck:
        assert wait_until(lambda: bool(stuck.events("stuck")))
        (event,) = stuck.events("stuck")
        assert (event["waiting"], event["for"]) == ([1], [0])
        assert event["waited_s"] >= 3
        stuck.process.send_signal(signal.SIGINT)
        done = stuck.end()
    assert done.code == 130
    assert done.err.count(WHERE.format(line=SLEEPING_LINE)) == 2, done.err


def test_a_worker_that_computes_in_c_with_the_interpreters_lock_is_named_and_not_killed(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, BUSY_IN_C, stall_s=1) as stuck:
        done = stuck.end()
        assert not stuck.events("death")
        (event,) = stuck.events("stuck")
        assert event["for"] == [0]
    assert done.code == 0, done.err
    assert done.out.count("ended as one of 2") == 2
    assert "worker 1 waits for worker 0" in done.err
    assert "ctypes.PyDLL(None).read(ends" in done.err


def dumped(*files: str) -> list[str]:
    lines = [f'  File "{file}", line 1 in function' for file in files]
    return ["Current thread 0x1 (most recent call first):", '  File "old.py", line 3 in old', "Stack", *lines]


@pytest.mark.parametrize(
    ("files", "doing"),
    [
        ((f"{PACKAGE}/comm/transports/counters.py", f"{PACKAGE}/engine/step.py", "mine.py"), Doing.WAITS),
        (("/x/site-packages/torch/distributed/c10d.py", f"{PACKAGE}/placement/placed.py"), Doing.WAITS),
        (("/x/site-packages/torch/autograd/graph.py", f"{PACKAGE}/replica/part.py", "mine.py"), Doing.WORKS),
        ((f"{os.__file__}", "/x/site-packages/dataset/read.py", "mine.py"), Doing.WORKS),
        (("mine.py", f"{PACKAGE}/replica/part.py", f"{PACKAGE}/comm/shared.py"), Doing.WORKS),
        ((f"{PACKAGE}/checkpoint/writer.py", f"{PACKAGE}/engine/step.py", "mine.py"), Doing.SAVES),
        ((f"{PACKAGE}/servers/transport/tcp.py", f"{PACKAGE}/servers/process/server.py"), Doing.SERVES),
    ],
)
def test_a_stack_says_whether_its_process_waits_for_others(files: tuple[str, ...], doing: Doing) -> None:
    frames = stack.parse(dumped(*files))
    assert [frame.file for frame in frames] == [*files]
    assert stack.doing(frames) is doing


def test_only_a_process_that_the_kernel_holds_up_hangs() -> None:
    # A shell may have started the tests so that SIGINT is ignored.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        silences = Silences(0.0)
        assert not silences.hangs(process.pid)
        assert not kernel_view.catches(process.pid, signal.SIGUSR1)
        assert kernel_view.catches(process.pid, signal.SIGINT)
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: kernel_view.view(process.pid).is_stopped)
        assert silences.hangs(process.pid)
        process.kill()
    assert not silences.hangs(process.pid)
