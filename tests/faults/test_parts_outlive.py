"""Workers die that alone have a part of the only replica: others take over what is left in the host's memory.

`test_deaths.py` does this under every placement; here are the instants that matter.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.replica.state.step_copies import StepCopies
from tests.faults import checks, harness
from tests.faults.harness import Fault, Ran

STAGES = "pipeline:microbatches=2,split=2"
THREE = "pipeline:stages=3,microbatches=2,split=0-2"
LR = 0.002


def check(ran: Ran, faults: list[Fault], finished: set[int]) -> None:
    assert set(ran.ends) == finished
    checks.nothing_lost(ran, ran.fired, faults)


def test_deaths_in_the_middle_of_updates_are_finished_by_those_who_take_over(tmp_path: Path) -> None:
    """By an optimizer that nobody knows, with state of odd shapes: what it had changed is put back, and it makes the
    update again."""
    faults = [Fault(1, 6, "update"), Fault(0, 21, "update")]
    ran = harness.run(tmp_path, faults, workers=2, placement=STAGES, replace=2, optimizer="Own", lr=0.01)
    check(ran, faults, {2, 3})
    checks.one_history(ran, "Own", lr=0.01)


@pytest.mark.parametrize("placement", ["tensor", "sharded"])
def test_a_death_at_any_instant_leaves_the_numbers_of_one_process(placement: str, tmp_path: Path) -> None:
    """Also with a limit to the norm, which the parts know only together."""
    faults = [Fault(0, random.Random(7).uniform(0.0, 0.3)), Fault(1, 60)]
    settings = {"pause_s": 0.01, "lr": LR, "clip_norm": 0.5}
    ran = harness.run(tmp_path, faults, workers=2, placement=placement, replace=2, **settings)
    check(ran, faults, {2, 3})
    checks.one_history(ran, "momentum", lr=LR, clip_norm=0.5)


def test_a_second_death_while_the_others_wait_for_a_replacement(tmp_path: Path) -> None:
    """The second one had left its last step, and nobody has heard of it since; a replacement dies as well."""
    faults = [Fault(1, 5), Fault(0, 0.6), Fault(3, 0.7)]
    settings = {"optimizer": "Adam", "lr": LR}
    ran = harness.run(tmp_path, faults, workers=3, placement=THREE, replace=3, pause_s=0.02, **settings)
    check(ran, faults, {2, 4, 5})
    checks.one_history(ran, **settings)


def test_buffers_and_settings_are_those_of_the_last_step_that_counts() -> None:
    """A pass has changed the statistics of a step that is undone; a schedule, the rate of one that is finished."""
    norm = nn.BatchNorm1d(3)
    made = torch.optim.SGD(norm.parameters(), lr=0.5)
    memory: dict[int, torch.Tensor] = {}

    def of_worker(model: nn.Module, optimizer: torch.optim.Optimizer) -> StepCopies:
        asked = iter(range(99))

        def allocate(length: int, dtype: torch.dtype) -> torch.Tensor:
            return memory.setdefault(next(asked), torch.zeros(length, dtype=dtype))

        return StepCopies(lambda: list(model.buffers()), optimizer, allocate, workers=2, mine=1)

    copies = of_worker(norm, made)
    seen = []
    for step in range(1, 4):
        norm(torch.randn(8, 3))
        copies.make(step)
        seen.append({name: value.clone() for name, value in norm.named_buffers()})
        made.param_groups[0]["lr"] *= 0.1
    copies.put_back(2)
    assert all(torch.equal(value, seen[1][name]) for name, value in norm.named_buffers())
    copies.put_back(1)
    assert torch.equal(norm.running_mean, seen[1]["running_mean"]), (
        "of a step that is long over there is no copy"
    )
    other = nn.BatchNorm1d(3)
    another = torch.optim.SGD(other.parameters(), lr=0.5)
    heir = of_worker(other, another)
    heir.put_back(3)
    heir.take_settings(3)
    assert all(torch.equal(value, seen[2][name]) for name, value in other.named_buffers())
    assert another.param_groups[0]["lr"] == pytest.approx(0.005)
