"""Hosts lose workers, die, vanish and are cut off; the run goes on where its coordinator is, and who can comes back."""

from pathlib import Path

import pytest
import torch

from manyhands.lab import emulated_hosts
from tests.faults import checks, harness, on_hosts
from tests.faults.on_hosts import Fault, Ran

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def check(ran: Ran, faults: list[Fault], finished: int) -> None:
    assert len(ran.ends) >= finished, ran.said
    checks.nothing_lost(ran, ran.fired, faults)


def test_a_worker_of_each_host_is_killed(tmp_path: Path) -> None:
    faults = [Fault((1, 1), 0.2), Fault((0, 0), 1.2)]
    ran = on_hosts.run(tmp_path, (2, 2), faults, optimizer="Adam", pause_s=0.1)
    check(ran, faults, 2)
    checks.one_history(ran, "Adam")
    ours, theirs = sorted(ran.of("death"), key=lambda event: event["rank"])
    assert theirs["host"] == "10.77.0.2"
    assert theirs["how"] == ours["how"] == "killed by SIGKILL"
    assert f"worker {theirs['rank']} of host 10.77.0.2 died (killed by SIGKILL): noticed after " in ran.said
    assert (
        f"step {theirs['step']} begun again with {theirs['workers']} workers, training stood still for "
        in ran.said
    )


def test_a_worker_dies_in_the_middle_of_an_update_by_an_optimizer_that_nobody_knows(tmp_path: Path) -> None:
    fault = harness.Fault(1001, 4, "update")
    ran = on_hosts.run(tmp_path, (1, 2), [], inside=[fault], optimizer="Own", lr=0.01)
    assert {"kind": "fault", "step": fault.when, "fault": "update"} in ran.logs[fault.who]
    check(ran, [], 2)
    checks.one_history(ran, "Own", lr=0.01)


def test_deaths_while_factors_travel(tmp_path: Path) -> None:
    faults = [Fault((0, 1), 0.3), Fault((1, 0), 1.7)]
    ran = on_hosts.run(tmp_path, (2, 2), faults, optimizer="Wide", lr=0.01, pause_s=0.05)
    check(ran, faults, 2)
    checks.one_history(ran, "Wide", lr=0.01)


def test_deaths_while_sums_are_coded(tmp_path: Path) -> None:
    """What was left out goes on with the survivors of a host; nothing is lost but what a dead host had left out."""
    faults = [Fault((0, 1), 0.3), Fault((1, 0), 1.7)]
    ran = on_hosts.run(tmp_path, (2, 2), faults, optimizer="Wide", lr=0.01, codec="int8", pause_s=0.05)
    check(ran, faults, 2)
    first, *others = (ran.parameters(number) for number in ran.ends)
    assert all(torch.equal(first, other) for other in others), "hosts have different bits"
    together = harness.alone(ran.committed(), optimizer="Wide", lr=0.01)
    assert float((first - together).norm() / together.norm()) < 0.005


def test_parameters_of_several_types_are_each_workers_own(tmp_path: Path) -> None:
    faults = [Fault((1, 0), 0.3)]
    ran = on_hosts.run(tmp_path, (1, 2), faults, optimizer="Mixed", pause_s=0.1)
    check(ran, faults, 2)
    checks.one_history(ran, "Mixed")


def test_a_host_dies_and_another_vanishes(tmp_path: Path) -> None:
    """The last worker is alone in the end, and has lost nothing."""
    faults = [Fault((1,), 0.3, "host"), Fault((2,), 2.5, "vanish")]
    ran = on_hosts.run(tmp_path, (1, 2, 1), faults, pause_s=0.25)
    check(ran, faults, 1)
    checks.one_history(ran, "momentum")
    assert [event["host"] for event in ran.of("host")] == ["10.77.0.2", "10.77.0.3"]
    assert [len(event["ranks"]) for event in ran.of("host")] == [2, 1]
    assert "host 10.77.0.3 is gone (nothing was heard of it any more), with worker " in ran.said


def test_hosts_are_parted_and_come_back(tmp_path: Path) -> None:
    """Two of four, and then one of four, for longer than it takes to be given up; nobody restarts."""
    faults = [Fault((2, 3), 0.3, "part", 4.0), Fault((1,), 6.5, "part", 4.0)]
    ran = on_hosts.run(tmp_path, (1, 1, 1, 1), faults, pause_s=0.3)
    check(ran, faults, 4)
    checks.one_history(ran, "momentum")
    gone = [event["host"] for event in ran.of("host")]
    assert sorted(gone[:2]) == ["10.77.0.3", "10.77.0.4"]
    assert gone[2:] == ["10.77.0.2"]
    assert all(end["workers"] == 4 for end in ran.ends.values())


def test_a_cut_link_under_local_sgd(tmp_path: Path) -> None:
    faults = [Fault((1, 0), 0.3), Fault((1,), 2.5, "cut", 5.0)]
    ran = on_hosts.run(tmp_path, (1, 2), faults, strategy="local-sgd:period=4", pause_s=0.25)
    check(ran, faults, 2)
    assert [event["host"] for event in ran.of("host")] == ["10.77.0.2"]
