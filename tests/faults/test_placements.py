"""A worker dies whose part no other process has: all begin again from the newest checkpoint, and lose nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands import strategies
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from manyhands.launching.restart import Restart
from manyhands.launching.run import elastic_terms
from manyhands.placement import Mesh
from tests.end_to_end.commands import manyhands, parameters
from tests.sessions import session_of
from tests.threads import in_threads

PLACEMENT = "pipeline:microbatches=2,split=2"

PIECES = """
import torch
import torch.nn.functional as F
from torch import nn

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def make():
    torch.manual_seed(0)
    data = [(torch.randn(6), torch.tensor(n % 3)) for n in range(60)]
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return data, model, torch.optim.Adam(model.parameters(), lr=0.01)
"""

SCRIPT = f"""{PIECES}
import os, signal
from pathlib import Path
import manyhands as mh

data, model, optimizer = make()
session = mh.session(model, optimizer, loss)
session.resume()
while session.epoch < 2:
    for batch in session.batches(data, batch_size=10):
        session.step(batch)
        if session.steps == 4:
            session.save(wait=True)
        if session.steps == 7 and session.rank == 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
session.save(wait=True)
"""


def undisturbed() -> dict[str, Tensor]:
    """The parameters of the same run, whose workers are threads and live."""
    scope: dict[str, Any] = {}
    exec(PIECES, scope)
    made = [scope["make"]() for _ in range(2)]  # one after the other: they draw from one source

    def work(world: World) -> dict[str, Tensor]:
        data, model, optimizer = made[world.rank]
        session = session_of(model, optimizer, scope["loss"], world=world, placement=PLACEMENT)
        while session.epoch < 2:
            for batch in session.batches(data, batch_size=10):
                session.step(batch)
        session.close()
        return {f"model/{name}": value for name, value in model.state_dict().items()}

    return in_threads(2, work)[0]


def test_a_killed_stage_costs_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--workers", "2", "--threads", "1", "--placement", PLACEMENT, "--out", "run"]
    options += [
        "--strategy",
        "parameter-server",
        "--servers",
        "2",
    ]  # which cannot do without a worker of a part
    done = manyhands("launch", *options, "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "died").exists()
    (line,) = [line for line in done.err.splitlines() if "begin again" in line]
    assert "worker 1 of 2 died: killed by SIGKILL; its replica is not whole without it" in line
    assert "all workers begin again from step-00000004" in line
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["committed"]["once"] == 120
    torch.testing.assert_close(parameters(tmp_path / "run"), undisturbed(), rtol=1e-6, atol=1e-7)


KILLED = Outcome(ok=False, exit_code=137, message="worker 1 of 2 died: killed by SIGKILL", rank=1)


def end(
    outcomes: list[Outcome], run: Path, *, times: int = 3
) -> tuple[Outcome, list[list[str]], list[Event]]:
    """How a run ends whose attempts end like this, what was started, and what a person was told."""
    started: list[list[str]] = []
    told: list[Event] = []

    def attempt(command: list[str]) -> Outcome:
        started.append(command)
        return outcomes[len(started) - 1]

    again = Restart(command=["job"], resume=["--resume"], times=times)
    return again.run(attempt, run, told.append), started, told


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints" / "step-000000000004").mkdir(parents=True)
    return tmp_path


def test_without_a_checkpoint_it_ends_and_says_so(tmp_path: Path) -> None:
    outcome, started, told = end([KILLED], tmp_path)
    assert outcome.message.endswith("and there is no checkpoint yet: start again")
    assert (outcome.exit_code, len(started), told) == (137, 1, [])


def test_it_does_not_begin_again_for_ever(saved: Path) -> None:
    outcome, started, told = end([KILLED] * 3, saved, times=2)
    assert started == [["job"], ["job", "--resume"], ["job", "--resume"]]
    assert len(told) == 2
    assert "2 new beginnings were made: --resume goes on from step-000000000004" in outcome.message
    script = Restart(command=["job"], resume=[], times=0)
    said = script.run(lambda command: KILLED, saved, lambda event: None).message
    assert f'session.resume("{saved / "checkpoints"}") in the script goes on from step-000000000004' in said


@pytest.mark.parametrize("code", [0, 1, 2, 75, 143])
def test_only_a_death_is_a_reason(code: int, saved: Path) -> None:
    ended = Outcome(ok=code == 0, exit_code=code, message="", rank=0)
    assert end([ended], saved) == (ended, [["job"]], [])


def test_an_interrupted_run_does_not_begin_again(saved: Path) -> None:
    ended = Outcome(ok=False, exit_code=130, message="interrupted by SIGINT")
    assert end([ended], saved)[0] is ended


def test_others_cannot_join_a_run_whose_replicas_are_in_parts() -> None:
    strategy, local = strategies.parse(strategies.DEFAULT), strategies.parse("local-sgd")
    for found, mesh, equal in [
        (strategy, Mesh(stages=2), True),
        (strategy, Mesh(replicas=2, stages=2), True),
        (local, Mesh(replicas=2, stages=2), False),
        (local, Mesh(stages=2), False),
    ]:
        terms = elastic_terms(found, mesh, mesh.workers, None)
        assert terms is not None
        assert (terms.most, terms.group_size) == (mesh.workers, 2)
        assert (terms.replicas_equal, terms.parts_outlive) == (equal, True)
    assert elastic_terms(strategy, Mesh(stages=2), 2, 0) is None, "no worker could take a part over"
    served = strategies.parse("parameter-server")
    assert elastic_terms(served, Mesh(replicas=2, stages=2), 4, None) is None, "its servers need everyone"
    with pytest.raises(UsageError, match="use --workers 2"):
        elastic_terms(strategy, Mesh(stages=2), 4, None)
