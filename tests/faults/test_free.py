"""A worker dies where workers do not wait for each other, or meet in pairs: the others go on, and that one is named."""

from pathlib import Path

import pytest

from tests.end_to_end.commands import manyhands

# Worker 1 dies in the middle of its fourth step; the others go on, each at its own pace.
SCRIPT = """
import itertools, os, signal, time, torch
import manyhands as mh

def loss(model, batch):
    if session.rank == 1 and session.steps == 3:
        print("dying", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return model(batch).square().mean()

torch.set_num_threads(1)
net = torch.nn.Linear(4, 2)
session = mh.session(net, torch.optim.SGD(net.parameters(), lr=0.01), loss)
for batch in session.batches(itertools.repeat(torch.ones(2, 4), 100)):
    session.step(batch)
"""


@pytest.mark.parametrize("strategy", ["hogwild", "gossip"])
def test_a_death_does_not_end_the_run(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = manyhands("launch", "--workers", "3", "--strategy", strategy, "script.py", cwd=tmp_path)
    assert "dying" in done.out
    assert done.code == 0, done.err
    assert "worker 1 died (killed by SIGKILL)" in done.err
    assert "Traceback" not in done.err
