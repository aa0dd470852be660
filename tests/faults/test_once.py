"""What one worker does for all goes on when that worker dies."""

from pathlib import Path

import pytest

from manyhands.engine.once import Nothing, OnMain
from tests.end_to_end.commands import manyhands

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import manyhands as mh

class Log:
    def __init__(self):
        self.lines = 0
        self.file = Path(f"log-{os.getpid()}").open("w", buffering=1)
    def log(self, **values):
        self.lines += 1
        self.file.write(f"{values}\\n")
        return self.lines

def loss(model, batch):
    if session.rank == 0 and session.steps == 3 and session.workers == 3:
        Path("dead").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return model(batch).square().mean()

model = torch.nn.Linear(3, 1)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
log = session.once(Log)
was = session.is_main
assert bool(log) == was
data = [torch.ones(3) for _ in range(96)]
for batch in session.batches(data, batch_size=8):
    value = session.step(batch)
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(session.rank) == str(mh.rank())
    assert os.environ["WORLD_SIZE"] == str(session.workers) == str(mh.workers())
    log.log(step=session.steps, loss=value)
    log.color = "red"
    if session.steps == 4:
        print("main" if session.is_main else "other", "was", "main" if was else "other", flush=True)
        assert not session.is_main or Path(f"log-{os.getpid()}").exists()
"""


@pytest.mark.processes
def test_the_log_goes_on_when_the_main_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = manyhands("launch", "--workers", "3", "--out", "run", "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "worker 0 died (killed by SIGKILL)" in done.err
    assert done.out.count("main was other") == 1
    dead = (tmp_path / "dead").read_text()
    first, second = sorted(tmp_path.glob("log-*"), key=lambda path: path.name != f"log-{dead}")
    steps = [line.split(",")[0] for path in (first, second) for line in path.read_text().splitlines()]
    assert first.name == f"log-{dead}"
    assert steps == [f"{{'step': {step}" for step in range(1, len(steps) + 1)], "every step once"
    assert len(steps) > 4


FIRST = """
import os, signal
from pathlib import Path
import manyhands as mh
with mh.main_process_first():
    if not Path("prepared").exists():
        if mh.rank() == 0:
            Path("half").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        assert Path("half").exists()
        Path("prepared").touch()
print("came after", Path("prepared").exists(), flush=True)
"""


@pytest.mark.processes
def test_when_the_first_worker_dies_in_its_block_the_next_one_is_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FIRST)
    done = manyhands("launch", "--workers", "3", "--out", "run", "script.py", cwd=tmp_path)
    assert "worker 0 died (killed by SIGKILL)" in done.err
    assert done.out.count("came after True") >= 2, done.err


def test_the_stand_in_does_nothing_whatever_is_done_with_it() -> None:
    made: list[str] = []
    log = OnMain(lambda: made.append("made"), lambda: False)
    assert not log
    assert isinstance(log.config.update({"a": 1}), Nothing)
    log["key"] = log["other"]
    log.name = "mine"
    with log.timer("step") as timer:
        timer.note(1)
    assert list(log.history) == []
    assert not hasattr(log, "__deepcopy__")
    assert made == []
