"""`mh.run` in a real Jupyter kernel, and the notebook among the examples."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.end_to_end.commands import clean_environment, run
from tests.faults.test_run import descendants, is_gone, wait_until
from tests.pages import ROOT

CELLS = Path(__file__).with_name("cells.py")
NOTEBOOK = ROOT / "examples" / "digits.ipynb"


def environment(folder: Path) -> dict[str, str]:
    """Jupyter keeps its connections and its history there."""
    return clean_environment(JUPYTER_RUNTIME_DIR=str(folder / "jupyter"), IPYTHONDIR=str(folder / "ipython"))


def executed(what: Path, folder: Path) -> Any:
    done = run([sys.executable, str(CELLS), str(what)], folder, environment(folder))
    assert done.code == 0, done.err
    return json.loads(done.out)


DEFINE = """
import glob, os, torch
import manyhands as mh

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
    def forward(self, inputs):
        return self.linear(inputs)

torch.manual_seed(7)
first = torch.nn.Linear(3, 1).weight.detach().clone()
torch.manual_seed(7)

def train(epochs, forever=False):
    drawn = torch.nn.Linear(3, 1).weight.detach()
    model = Net()
    session = mh.session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
    )
    while forever or session.epoch < epochs:
        for batch in session.batches([torch.ones(3)] * 16, batch_size=4):
            session.step(batch)
        if session.epoch == 1:
            print("trained an epoch", flush=True)
    return session.rank, model, model.state_dict(), drawn
"""

USE = """
results = mh.run(train, 2, workers=2)
ranks = [rank for rank, *_ in results]
models = [model for _, model, *_ in results]
same = all(torch.equal(one, other) for one, other in zip(results[0][2].values(), models[1].state_dict().values()))
(ranks, all(type(model) is Net for model in models), same, models[0](torch.ones(3)).shape, results.summary["steps"],
 torch.equal(results[1][3], first))
"""

BAD = """
def bad():
    train(1)
    if mh.rank() == 1:
        raise ValueError("no good")  # this line
mh.run(bad)
"""


def test_cells_run_show_progress_and_survive_errors_and_interrupts(tmp_path: Path) -> None:
    left = (
        "(open(f'/proc/self/task/{os.getpid()}/children').read(), "
        "[one for one in map(os.path.realpath, glob.glob('/proc/self/fd/*')) if 'manyhands' in one or 'pidfd' in one])"
    )
    cells = [DEFINE, USE, BAD, ["mh.run(train, 1, True)", "trained an epoch"], left, "mh.run(mh.rank)"]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    _, used, bad, interrupted, leftovers, again = executed(tmp_path / "cells.json", tmp_path)
    assert used["error"] == "", used["said"]
    assert used["value"] == "([0, 1], True, True, torch.Size([1]), 4, True)"
    assert "[worker 0] trained an epoch" in used["stdout"]
    assert used["stderr"] == ""
    assert "epoch 2  step 4  loss " in used["shown"]
    assert bad["error"] == "RunFailed"
    assert bad["said"].startswith("worker 1 of 2 ended with ValueError: no good\n\nTraceback")
    assert bad["said"].count('raise ValueError("no good")  # this line') == 1
    assert "Traceback" not in bad["stdout"] + bad["stderr"]
    assert interrupted["error"] == "KeyboardInterrupt"
    assert leftovers["value"] == "('', [])"
    assert again["value"] == "[0, 1]"


def test_a_killed_kernel_leaves_no_worker(tmp_path: Path) -> None:
    cells = [DEFINE, "mh.run(train, 1, True)"]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    jupyter = subprocess.Popen(
        [sys.executable, str(CELLS), str(tmp_path / "cells.json")],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        events = tmp_path / "runs"
        assert wait_until(
            lambda: sum(path.stat().st_size > 500 for path in events.glob("*/events/worker-*.jsonl")) == 2
        )
        _, kernel, *below = descendants(jupyter.pid)
        assert len(below) >= 4, "two workers, the coordinator and the shell that guards them"
        os.kill(kernel, signal.SIGKILL)
        assert wait_until(lambda: all(map(is_gone, below)))
    finally:
        jupyter.kill()
        jupyter.wait()


def test_the_notebook_among_the_examples(tmp_path: Path) -> None:
    source = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in source["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "clear its outputs"
    outputs = [cell["stdout"] for cell in executed(NOTEBOOK, tmp_path)]
    assert any("epoch 3  loss" in text for text in outputs)
    (accuracy,) = [float(text.split()[-1]) for text in outputs if text.startswith("accuracy here")]
    assert accuracy > 0.8
    assert "ended with ValueError" in outputs[-1]
