"""A run that is told to end: it finishes its step, saves and leaves, and goes on later as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contracts.test_saving import syncing_after
from tests.end_to_end.commands import BIN, Done, clean_environment, manyhands, parameters, run, same_bits
from tests.faults.test_run import descendants, is_gone, wait_until

MODULE = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, classes))

    def forward(self, inputs):
        if self.training:
            time.sleep(0.03)
        return self.net(inputs)
"""

SCRIPT = """
import sys, time
import torch
import manyhands as mh

class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 300
    def __getitem__(self, index):
        return torch.full((3,), float(index))

def loss(model, batch):
    time.sleep(0.05)
    return model(batch / 300).square().mean()

model = torch.nn.Linear(3, 2)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
session.resume(sys.argv[1])
try:
    for batch in session.batches(Numbered(), batch_size=4):
        session.step(batch)
        print("used", *[int(row[0]) for row in batch], flush=True)
finally:
    print("tidied up", flush=True)
print("epoch", session.epoch, flush=True)
"""


class Started:
    """A command under way."""

    def __init__(self, process: "subprocess.Popen[str]", out: Path) -> None:
        self.process = process
        self.out = out

    def wait_for_output(self, words: str, times: int) -> None:
        assert wait_until(
            lambda: self.out.read_text().count(words) >= times or self.process.poll() is not None
        )
        assert self.process.poll() is None, self.end()

    def end(self) -> Done:
        _, err = self.process.communicate(timeout=60)
        return Done(code=self.process.returncode, out=self.out.read_text(), err=err)


@contextmanager
def started(folder: Path, *command: str) -> Iterator[Started]:
    """Standard output goes to a file, so that it can be read meanwhile; nothing outlives the test."""
    out = folder / "stdout"
    with (
        out.open("w") as stdout,
        subprocess.Popen(
            command, cwd=folder, env=clean_environment(), stdout=stdout, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        everyone = [process.pid]
        try:
            yield Started(process, out)
            everyone = descendants(process.pid)
        finally:
            for pid in everyone:
                if not is_gone(pid):
                    os.kill(pid, signal.SIGKILL)


def stepped(run_dir: Path, steps: int) -> bool:
    path = run_dir / "events" / "worker-0.jsonl"
    return path.exists() and path.read_text().count('"kind":"step"') >= steps


def test_a_run_that_was_told_to_end_and_goes_on_equals_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    plan = ["train", "--model", "mine:Slow", "--epochs", "2", "--optimizer", "adam:lr=0.003"]
    with started(tmp_path, str(BIN / "manyhands"), *plan, "--out", "told") as told:
        assert wait_until(lambda: stepped(tmp_path / "told", 5))
        told.process.send_signal(signal.SIGTERM)
        done = told.end()
    assert done.code == 75, done.err
    *_, last = done.err.splitlines()
    assert last == (
        "told to end by SIGTERM: the run is saved in told; manyhands train --out told --resume goes on with it"
    )
    assert done.err.count("SIGTERM: the workers finish their step, save and leave") == 1
    assert "Traceback" not in done.err
    (place,) = (tmp_path / "told" / "checkpoints").glob("step-*")
    saved_at = int(place.name[5:])
    assert f"asked to leave: saved step {saved_at} in" in done.err
    assert 5 <= saved_at < 46, "in the middle"
    again = manyhands("train", "--out", "told", "--resume", "--json", cwd=tmp_path)
    whole = manyhands(*plan, "--out", "whole", cwd=tmp_path)
    assert again.code == whole.code == 0, again.err + whole.err
    assert again.err.count(f"going on from told/checkpoints/step-{saved_at:08d} (epoch ") == 1
    assert same_bits(parameters(tmp_path / "told"), parameters(tmp_path / "whole"))
    assert json.loads(again.out)["steps"] == 46


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        (["all-reduce"], "one worker"),
        (["hogwild"], "everyone"),
        (["parameter-server:async", "--servers", "1"], "everyone"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else given,
)
def test_a_script_leaves_whoever_is_told_and_goes_on_with_the_samples_that_are_left(
    strategy: list[str], how: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        "launch",
        "--workers",
        "2",
        "--out",
        "run",
        "--strategy",
        *strategy,
        "script.py",
        "checkpoints",
    ]
    with started(tmp_path, str(BIN / "manyhands"), *command) as first:
        first.wait_for_output("used", 6)
        # As systemd and Slurm do: to every process of the job, and the launcher passes it on besides.
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(first.process.pid)}
        chosen = [pid for pid, name in names.items() if name.startswith(("worker", "server"))]
        for pid in [first.process.pid, *chosen] if how == "everyone" else chosen[:1]:
            os.kill(pid, signal.SIGTERM)
        done = first.end()
    assert done.code == 75, done.err
    assert done.out.count("tidied up") == 2
    assert "epoch" not in done.out
    assert "in checkpoints" in done.err
    again = manyhands(*command, cwd=tmp_path)
    assert again.code == 0, again.err
    assert again.out.count("epoch 1") == 2
    lines = [line for line in (done.out + again.out).splitlines() if "used" in line]
    used = [int(word) for line in lines for word in line.partition("used")[2].split()]
    # What one was in the middle of when it left is in the checkpoint, and was not printed.
    assert len(used) == len(set(used))
    assert 300 - 2 * 4 <= len(used) <= 300


STUCK = SCRIPT.replace("time.sleep(0.05)", "print('stuck', flush=True); time.sleep(600)")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STUCK)
    with started(tmp_path, str(BIN / "manyhands"), "launch", "script.py", "checkpoints") as run_:
        run_.wait_for_output("stuck", 2)
        run_.process.send_signal(signal.SIGTERM)
        assert run_.process.stderr
        while "a second signal ends them at once" not in run_.process.stderr.readline():
            pass
        everyone = descendants(run_.process.pid)
        run_.process.send_signal(second)
        assert run_.end().code == 143
        assert wait_until(lambda: all(is_gone(pid) for pid in everyone))


SAVING = """
import sys, time
import torch
import manyhands as mh
from manyhands.checkpoint import background_write

background_write._START = sys.argv[1]
model = torch.nn.Linear(8, 8)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
session.save("checkpoints")
while True:
    session.step(torch.ones(4, 8))
"""


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVING)
    command = ["launch", "--workers", "2", "--out", "run", "script.py", syncing_after(tmp_path / "never")]
    with started(tmp_path, str(BIN / "manyhands"), *command) as run_:
        checkpoints = tmp_path / "checkpoints"
        assert wait_until(lambda: checkpoints.exists() and any(checkpoints.iterdir()))
        everyone = descendants(run_.process.pid)
        run_.process.send_signal(signal.SIGINT)
        done = run_.end()
        assert done.code == 130, done.err
        assert wait_until(lambda: all(is_gone(pid) for pid in everyone))
    assert list(checkpoints.iterdir()) == []


def test_a_script_alone_saves_where_it_looked_and_a_second_signal_ends_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("300", "80").replace("session.resume", "print"))
    command = [sys.executable, "script.py", "checkpoints"]
    with started(tmp_path, *command) as first:
        first.wait_for_output("used", 2)
        first.process.send_signal(signal.SIGTERM)
        done = first.end()
    assert done.code == 143, "nothing was ever saved or looked for: there is no place to save in"
    assert done.err == "asked to leave: there is no directory to save in\n"
    (tmp_path / "script.py").write_text(SCRIPT.replace("300", "80"))
    with started(tmp_path, *command) as second:
        second.wait_for_output("used", 2)
        second.process.send_signal(signal.SIGTERM)
        done = second.end()
    assert done.code == 75, done.err
    assert "asked to leave: saved step" in done.err
    again = run(command, tmp_path)
    assert again.out.endswith("epoch 1\n")
    assert again.out.count("used") == 20 - done.out.count("used") - 1
    (tmp_path / "script.py").write_text(STUCK)
    with started(tmp_path, *command) as stuck:
        stuck.wait_for_output("stuck", 1)
        stuck.process.send_signal(signal.SIGTERM)
        stuck.process.send_signal(signal.SIGTERM)
        while stuck.process.poll() is None:
            stuck.process.send_signal(signal.SIGTERM)
        assert stuck.process.returncode == -signal.SIGTERM
