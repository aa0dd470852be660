"""The same script and the same command under every launcher: one world each, and the same parameters in all."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.end_to_end.commands import BIN, TIMEOUT_S, Done, clean_environment, parameters, run, same_bits

STEPS = 5
GLOBAL_BATCH = 16

# Rank 0 writes what all have trained; the batch per worker follows from the number of workers.
SCRIPT = f"""
import sys
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from safetensors.torch import save_file
import manyhands as mh

def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn({GLOBAL_BATCH * STEPS}, 20)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
rank = mh.rank()  # before there is a session
session = mh.session(model, optimizer, loss)
assert (session.rank, session.is_main) == (rank, rank == 0)
for batch in session.batches(data, batch_size={GLOBAL_BATCH} // session.workers):
    session.step(batch)
session.close()
if session.is_main:
    state = {{name: value.clone() for name, value in model.state_dict().items()}}
    save_file(state, sys.argv[1], {{"workers": str(session.workers), "launcher": session.world.rank_info.launcher}})
"""

Launcher = Callable[[list[str], Path], Done]


def under_torchrun(command: list[str], cwd: Path) -> Done:
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--no-python"]
    return run([*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command], cwd)


def under_mpiexec(command: list[str], cwd: Path) -> Done:
    return run([str(BIN / "mpiexec"), "-n", "2", *command], cwd)


def under_slurm(command: list[str], cwd: Path) -> Done:
    """What `srun -n 2` leaves in the environment, and a meeting place on the loopback interface."""
    with contextlib.ExitStack() as stack:
        tasks, port = [], free_port()
        for rank in range(2):
            environ = clean_environment(
                SLURM_JOB_ID="4711",
                SLURM_STEP_ID="0",
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                SLURM_NTASKS="2",
                SLURM_STEP_NODELIST="localhost",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            task = stack.enter_context(subprocess.Popen(command, cwd=cwd, env=environ, text=True, **pipes))
            stack.callback(task.kill)
            tasks.append(task)
        said = [task.communicate(timeout=TIMEOUT_S) for task in tasks]
        return Done(
            code=max(abs(task.returncode) for task in tasks),
            out="".join(out for out, _ in said),
            err="".join(err for _, err in said),
        )


def free_port() -> int:
    # Slurm gives no port to the job either; a script that names one must know that it is free.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


FOREIGN: dict[str, Launcher] = {"torchrun": under_torchrun, "mpi": under_mpiexec, "slurm": under_slurm}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    return path


def trained(done: Done, path: Path, launcher: str, workers: int) -> dict[str, Tensor]:
    """What the script wrote, if it ran in the world that it should have."""
    assert done.code == 0, done.err
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"workers": str(workers), "launcher": launcher}
        return {name: file.get_tensor(name) for name in list(file.keys())}


@pytest.fixture(scope="module")
def ours(script: Path) -> dict[str, Tensor]:
    command = [str(BIN / "manyhands"), "launch", "--workers", "2", "--threads", "1", "--out", "run"]
    done = run([*command, str(script), "ours"], script.parent)
    summary = json.loads((script.parent / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["workers"], summary["samples"]) == (STEPS, 2, STEPS * GLOBAL_BATCH)
    return trained(done, script.parent / "ours", "manyhands", 2)


@pytest.mark.parametrize("launcher", FOREIGN)
def test_a_script_gives_the_same_bits_under(launcher: str, script: Path, ours: dict[str, Tensor]) -> None:
    done = FOREIGN[launcher]([sys.executable, str(script), launcher], script.parent)
    assert same_bits(trained(done, script.parent / launcher, launcher, 2), ours)


def test_a_script_alone_is_a_world_of_one(script: Path, ours: dict[str, Tensor]) -> None:
    done = run([sys.executable, str(script), "alone"], script.parent)
    assert done.err == ""
    alone = trained(done, script.parent / "alone", "alone", 1)
    for name, value in alone.items():
        torch.testing.assert_close(value, ours[name], rtol=1e-5, atol=1e-7)


def test_launch_joins_the_world_it_finds(script: Path, ours: dict[str, Tensor]) -> None:
    command = [str(BIN / "manyhands"), "launch", "--out", "joined-run", str(script), "joined"]
    done = under_torchrun(command, script.parent)
    assert same_bits(trained(done, script.parent / "joined", "torchrun", 2), ours)
    assert len(list(script.parent.glob("joined-run/events/worker-*.jsonl"))) == 2


TRAIN = [str(BIN / "manyhands"), "train", "--steps", str(STEPS), "--model", "mlp", "--json", "--out"]


@pytest.fixture(scope="module")
def our_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    done = run([*TRAIN, "run", "--workers", "2", "--threads", "1"], folder)
    assert done.code == 0, done.err
    return folder / "run"


@pytest.mark.parametrize("launcher", FOREIGN)
def test_train_joins_the_world_it_finds(launcher: str, our_run: Path, tmp_path: Path) -> None:
    done = FOREIGN[launcher]([*TRAIN, "run"], tmp_path)
    assert done.code == 0, done.err
    summary = json.loads(done.out)  # from one worker, not from each
    assert (summary["steps"], summary["workers"], summary["hosts"]) == (STEPS, 2, 1)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()).keys() == summary.keys()
    assert same_bits(parameters(tmp_path / "run"), parameters(our_run))
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["cluster"]["workers"] == 2


def test_a_refusal_ends_every_worker_of_a_foreign_world(tmp_path: Path) -> None:
    done = under_slurm([*TRAIN, "run", "--workers", "3"], tmp_path)
    assert done.code != 0
    lines = done.err.splitlines()
    assert lines == ["error: --workers 3 but slurm started 2; leave --workers out, or start 3 with slurm"] * 2


def test_a_refusal_of_one_worker_does_not_leave_it_waiting_for_the_others(our_run: Path) -> None:
    """Only worker 0 reads the checkpoint, after all have met: the others learn of it by its end."""
    done = under_slurm([*TRAIN, "run", "--resume", "--model", "mlp:hidden=8"], our_run.parent)
    assert done.code != 0
    assert "Traceback" not in done.err
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2
    assert any("another model" in line for line in lines)
    assert any("worker 0 is gone" in line for line in lines)
