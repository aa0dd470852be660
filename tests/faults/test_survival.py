"""Workers die and the others go on: their processes, their parameters and the count of samples stay right."""

from pathlib import Path

import pytest
import torch

from tests.faults import harness, training
from tests.faults.harness import Fault, Ran

WHOLE = {"once": 2 * training.LENGTH, "twice": 0, "never": 0}


def check(ran: Ran, faults: list[Fault], survivors: set[int]) -> None:
    """What holds in every run, whatever died."""
    assert sorted(ran.fired, key=str) == sorted(faults, key=str), "the faults fired"
    assert set(ran.ends) == survivors
    for number, end in ran.ends.items():
        assert end["pid"] == ran.logs[number][0]["pid"], "it kept its process"
        if ran.logs[number][0]["kind"] == "start" and number in survivors:
            assert end["tally"] == WHOLE, "every sample exactly once in each epoch"
    first = ran.parameters(min(survivors))
    assert all(torch.equal(first, ran.parameters(number)) for number in survivors)


@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
def test_one_of_three_dies_in_its_forward_pass(optimizer: str, tmp_path: Path) -> None:
    faults = [Fault(1, 7)]
    ran = harness.run(tmp_path, faults, optimizer=optimizer)
    check(ran, faults, {0, 2})
    (death,) = ran.of("death")
    assert death.text.startswith("worker 1 died (killed by SIGKILL): noticed after ")
    assert "step 7 begun again with 2 workers" in death.text
    together = harness.alone(ran.committed(), optimizer=optimizer, lr=0.05)
    torch.testing.assert_close(ran.parameters(0), together, rtol=1e-6, atol=1e-6)
