"""A cosine schedule ends where that of one process ends, whichever worker dies and however others share its work."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from manyhands import strategies
from tests.end_to_end.commands import BIN, clean_environment
from tests.faults import checks, harness, registered, training
from tests.faults.harness import Fault
from tests.faults.test_run import descendants, wait_until

WORKERS = 3
STEPS = checks.EPOCHS * -(-training.LENGTH // (training.BATCH * WORKERS))
LONG = 2 * STEPS  # the schedule's own end lies beyond that of the run, so no rate comes twice
RATE = training.LR / 5

# Workers with updates of their own: the fewer there are, the more steps each of them makes.
APART = [
    text
    for text in (*strategies.STRATEGIES, "parameter-server:async")
    if not strategies.parse(text).traits.pooled and registered.workers(text, replicas=WORKERS) == WORKERS
]


def rate_of_one_process() -> float:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], RATE)
    schedule = CosineAnnealingLR(optimizer, LONG)
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("number", "strategy"), list(enumerate(APART)))
def test_all_workers_end_at_the_rate_of_one_process(number: int, strategy: str, tmp_path: Path) -> None:
    """Every second strategy replaces the dead worker; the one that joins has the rate of the others."""
    replace = number % 2
    faults = [Fault(0, 9)]
    ran = harness.run(
        tmp_path,
        faults,
        workers=WORKERS,
        strategy=strategy,
        servers=registered.servers(strategy),
        replace=replace,
        until=WORKERS * replace,
        lr=RATE,
        cosine=LONG,
        pause_s=0.0 if strategies.parse(strategy).traits.lockstep else 0.02,
    )
    assert len(ran.ends) == WORKERS - 1 + replace
    checks.nothing_lost(ran, ran.fired, faults)
    assert {end["rate"] for end in ran.ends.values()} == {rate_of_one_process()}


def test_steps_of_a_plan_are_steps_of_the_whole_run(tmp_path: Path) -> None:
    """Each of three workers has batches of its own; one dies, and the other two use what it would have used."""
    (tmp_path / "job.toml").write_text(
        'model = "mlp:hidden=16"\nstrategy = "local-sgd"\n[train]\nsteps = 150\nbatch = 4\n'
        "[cluster]\nworkers = 3\nreplace = 0\n"
    )
    launcher = subprocess.Popen(
        [str(BIN / "manyhands"), "train", "job.toml", "--json", "--out", "run"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    events = tmp_path / "run" / "events" / "worker-1.jsonl"
    assert wait_until(lambda: events.exists() and '"kind":"step"' in events.read_text())
    named = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in descendants(launcher.pid)}
    os.kill(named["worker 1"], signal.SIGKILL)
    summary = json.loads(launcher.communicate()[0])
    assert summary["workers"] == 2
    assert summary["samples"] == pytest.approx(150 * 4 * 3, abs=4 * 3 * 8), (
        "one round of averages more or less"
    )
    assert summary["steps"] > 150
