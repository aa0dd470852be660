"""A script that loads a checkpoint of its own; a worker that joins later runs it from the top."""

import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.commands import BIN, clean_environment, manyhands
from tests.faults.test_run import LONG_S, wait_until

SCRIPT = """
import copy, time
import torch
import manyhands as mh

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

plain, optimizer = make()
for _ in range(300):  # a checkpoint of plain PyTorch, the same on every worker
    optimizer.zero_grad()
    batch = torch.randn(16, 4)
    (plain(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
saved = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
for group in saved[1]["param_groups"]:
    group["lr"] = 0.0  # so the parameters stay those of the checkpoint

model, optimizer = make()
session = mh.session(model, optimizer, loss)
model.load_state_dict(saved[0])
optimizer.load_state_dict(saved[1])
joined = None
data = [torch.randn(4, generator=torch.Generator().manual_seed(number)) for number in range(400)]
for batch in session.batches(data * 1000, batch_size=8):
    session.step(batch)
    if session.workers == 2:
        time.sleep(0.01)
    elif joined is None:
        joined = session.steps
    elif session.steps == joined + 20:
        break
steps = {int(values["step"]) for values in optimizer.state_dict()["state"].values()}
same = all(torch.equal(param, want) for param, want in zip(model.state_dict().values(), saved[0].values()))
print("all", steps == {300 + session.steps}, same, optimizer.param_groups[0]["lr"], session.workers)
"""


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["all-reduce", "gossip"])
def test_a_new_worker_does_not_load_again_what_the_others_have_left_behind(
    strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    asked = ["--workers", "2:3", "--strategy", strategy, "--out", "run", "script.py"]
    command = [str(BIN / "manyhands"), "launch", *asked]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stdout=pipe, stderr=pipe, text=True
    ) as launcher:
        assert wait_until(lambda: (tmp_path / "run" / "join.json").exists() or launcher.poll() is not None)
        joined = manyhands("launch", "--join", "run", cwd=tmp_path)
        out, error = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0, error
    assert joined.code == 0, joined.err
    assert out.count("all True True 0.0 3") == 2, out
    assert (joined.out + joined.err).count("all True True 0.0 3") == 1, joined.err
