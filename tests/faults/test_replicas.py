"""A worker that has a part of one of several replicas dies: whole replicas keep their processes and go on."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import manyhands
from tests.faults import checks, harness
from tests.faults.harness import Fault, Ran

STAGES = "pipeline:microbatches=2,split=2"
LR = 0.002


def check(ran: Ran, faults: list[Fault], finished: set[int]) -> None:
    assert set(ran.ends) == finished
    checks.nothing_lost(ran, ran.fired, faults)


@pytest.mark.parametrize(
    ("placement", "strategy"),
    [
        (STAGES, "all-reduce"),
        (STAGES, "double-buffer"),
        ("hybrid:pipeline=1,tensor=2", "local-sgd:period=3"),
        ("sharded:shards=2", "all-reduce"),
    ],
)
def test_a_whole_replica_goes_on_and_the_broken_one_comes_back(
    placement: str, strategy: str, tmp_path: Path
) -> None:
    faults = [Fault(1, 7)]
    ran = harness.run(
        tmp_path,
        faults,
        workers=4,
        placement=placement,
        strategy=strategy,
        replace=1,
        until=4,
        optimizer="Adam",
        lr=LR,
    )
    check(ran, faults, {0, 2, 3, 4})
    (death,) = ran.of("death")
    assert "step 7 begun again with 2 workers" in death.text
    assert [event.text for event in ran.of("wait")] == [
        "worker 0 waits: its replica is not whole until another has joined"
    ]
    assert {event.fields["rank"] for event in ran.of("join")} == {0, 4}
    if strategy == "all-reduce":
        checks.one_history(ran, "Adam", lr=LR)


def test_a_death_at_any_instant_leaves_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Also while some parts are updated: the step counts for all parts or for none."""
    faults = [Fault(3, 0.05)]
    settings = {"pause_s": 0.01, "down_to": 2, "lr": LR, "clip_norm": 0.5}
    ran = harness.run(tmp_path, faults, workers=4, placement=STAGES, **settings)
    check(ran, faults, {0, 1})
    checks.one_history(ran, "momentum", lr=LR, clip_norm=0.5)


def test_where_no_replica_is_whole_the_parts_of_several_make_one(tmp_path: Path) -> None:
    faults = [Fault(0, 5), Fault(3, 5)]
    ran = harness.run(tmp_path, faults, workers=4, placement=STAGES, optimizer="Adam", lr=LR)
    check(ran, faults, {1, 2})
    checks.one_history(ran, "Adam", lr=LR)
    assert [event.text for event in ran.of("mixed")] == [
        "no replica was whole: the parts that are left of several make one, and nothing is lost"
    ]


def test_where_all_that_have_a_part_are_dead_another_worker_takes_it_over(tmp_path: Path) -> None:
    """Without a replacement: of the two that are left with the same part, one gives up its own."""
    faults = [Fault(1, 5), Fault(3, 5)]
    ran = harness.run(tmp_path, faults, workers=4, placement=STAGES, optimizer="Adam", lr=LR)
    check(ran, faults, {0, 2})
    checks.one_history(ran, "Adam", lr=LR)


SCRIPT = """
import os, signal
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
import manyhands as mh

torch.manual_seed(0)
data = [(torch.randn(6), torch.tensor(n % 3)) for n in range(60)]
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
session = mh.session(model, torch.optim.Adam(model.parameters()), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
session.resume()
number = session.rank
for batch in session.batches(data, batch_size=5):
    session.step(batch)
    if session.steps == 2:
        session.save(wait=True)
    mark = Path(f"died-{number}")
    if session.steps == 4 and number in (1, 3) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_where_a_part_is_lost_all_begin_again_from_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--workers", "4", "--threads", "1", "--placement", STAGES, "--out", "run"]
    options += ["--strategy", "parameter-server", "--servers", "2"]  # which needs a worker of every part
    done = manyhands("launch", *options, "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "died-1").exists()
    assert (tmp_path / "died-3").exists()
    assert "all workers begin again from step-00000002" in done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["committed"]["once"] == 60
    assert summary["committed"]["twice"] == summary["committed"]["never"] == 0
