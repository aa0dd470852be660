"""A cosine schedule ends where that of one process ends, whichever worker dies and however others share its work."""

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from manyhands import strategies
from tests.faults import checks, harness, registered, training
from tests.faults.harness import Fault

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
