"""Deaths where workers meet in the middle of their passes, as a SyncBatchNorm needs it: the others go back before the
step, with their running statistics, and make it again."""

from pathlib import Path
from typing import Any

import pytest

from manyhands.lab import emulated_hosts
from tests.faults import checks, harness, on_hosts, registered
from tests.faults.harness import Fault

ADAM: dict[str, Any] = {"optimizer": "Adam", "lr": 0.01, "norms": True}
WHY_NOT = emulated_hosts.available()


@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "parameter-server"])
def test_deaths_on_the_way_there_and_back(strategy: str, tmp_path: Path) -> None:
    faults = [Fault(0, 7, "forward"), Fault(2, 17, "backward")]
    servers = registered.servers(strategy)
    ran = harness.run(tmp_path, faults, workers=4, strategy=strategy, servers=servers, epochs=1, **ADAM)
    checks.nothing_lost(ran, ran.fired, faults, epochs=1)
    checks.one_history(ran, "Adam", lr=0.01, norms=True)


def test_deaths_in_the_first_half_of_a_step(tmp_path: Path) -> None:
    faults = [Fault(1, 5, "backward"), Fault(3, 9, "between"), Fault(0, 14, "forward")]
    ran = harness.run(tmp_path, faults, workers=4, halves=0.5, epochs=1, **ADAM)
    checks.nothing_lost(ran, ran.fired, faults, epochs=1)
    checks.one_history(ran, "Adam", lr=0.01, clip_norm=0.5, norms=True)


def test_others_join(tmp_path: Path) -> None:
    """The last worker goes on by itself, and is no longer alone when a replacement has come."""
    faults = [Fault(1, 7, "forward"), Fault(0, 9, "backward")]
    ran = harness.run(tmp_path, faults, workers=3, replace=2, until=3, **ADAM)
    checks.nothing_lost(ran, ran.fired, faults)
    checks.one_history(ran, "Adam", lr=0.01, norms=True)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_on_several_hosts(tmp_path: Path) -> None:
    """Workers of two of three hosts, one of whom speaks for its host."""
    inside = [Fault(2000, 3, "backward"), Fault(1, 9, "forward")]
    ran = on_hosts.run(tmp_path, (2, 1, 2), [], inside=inside, until=5, **ADAM)
    for fault in inside:
        assert {"kind": "fault", "step": fault.when, "fault": fault.kind} in ran.logs[fault.who]
    checks.nothing_lost(ran, [], [])
    checks.one_history(ran, "Adam", lr=0.01, norms=True)
