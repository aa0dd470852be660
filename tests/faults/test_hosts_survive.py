"""Hosts lose workers, die, vanish and are cut off; the run goes on where its coordinator is, and who can comes back."""

from pathlib import Path

import pytest
import torch

from manyhands.lab import hosts
from tests.faults import harness, on_hosts, training
from tests.faults.on_hosts import Fault, Ran

WHY_NOT = hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

EPOCHS = 2
WHOLE = {"once": EPOCHS * training.LENGTH, "twice": 0, "never": 0}


def check(ran: Ran, faults: list[Fault], finished: int) -> None:
    """What holds in every run, whatever was lost."""
    assert sorted(ran.fired, key=str) == sorted(faults, key=str), "the faults fired"
    assert len(ran.ends) >= finished, ran.said
    for number, end in ran.ends.items():
        assert end["pid"] == ran.logs[number][0]["pid"], "it kept its process"
        assert len([row for row in ran.logs[number] if row["kind"] == "start"]) == 1
        assert end["tally"] == WHOLE, "every sample exactly once in each epoch"
        assert end["samples"] == WHOLE["once"]
    first = ran.parameters(min(ran.ends))
    assert all(torch.equal(first, ran.parameters(number)) for number in ran.ends), "the same bits everywhere"


def check_numbers(ran: Ran, optimizer: str) -> None:
    """One process that has made the same steps has the same parameters: there was one history. Where a gradient is
    nearly 0, Adam makes much of its rounding."""
    together = harness.alone(ran.committed(), optimizer=optimizer, lr=training.LR)
    difference = 1e-5 if optimizer == "Adam" else 1e-6
    torch.testing.assert_close(ran.parameters(min(ran.ends)), together, rtol=1e-6, atol=difference)


def test_a_worker_of_each_host_is_killed(tmp_path: Path) -> None:
    faults = [Fault((1, 1), 0.2), Fault((0, 0), 1.2)]
    ran = on_hosts.run(tmp_path, (2, 2), faults, optimizer="Adam", pause_s=0.1)
    check(ran, faults, 2)
    check_numbers(ran, "Adam")
    ours, theirs = sorted(ran.of("death"), key=lambda event: event["rank"])
    assert theirs["host"] == "10.77.0.2"
    assert theirs["how"] == ours["how"] == "killed by SIGKILL"
    assert f"worker {theirs['rank']} of host 10.77.0.2 died (killed by SIGKILL): noticed after " in ran.said
    assert (
        f"step {theirs['step']} begun again with {theirs['workers']} workers, training stood still for "
        in ran.said
    )


def test_a_host_dies_and_another_vanishes(tmp_path: Path) -> None:
    """The last worker is alone in the end, and has lost nothing."""
    faults = [Fault((1,), 0.3, "host"), Fault((2,), 2.5, "vanish")]
    ran = on_hosts.run(tmp_path, (1, 2, 1), faults, pause_s=0.25)
    check(ran, faults, 1)
    check_numbers(ran, "momentum")
    assert [event["host"] for event in ran.of("host")] == ["10.77.0.2", "10.77.0.3"]
    assert [len(event["ranks"]) for event in ran.of("host")] == [2, 1]
    assert "host 10.77.0.3 is gone (nothing was heard of it any more), with worker " in ran.said


def test_hosts_are_parted_and_come_back(tmp_path: Path) -> None:
    """Two of four, and then one of four, for longer than it takes to be given up; nobody restarts."""
    faults = [Fault((2, 3), 0.3, "part", 4.0), Fault((1,), 6.5, "part", 4.0)]
    ran = on_hosts.run(tmp_path, (1, 1, 1, 1), faults, pause_s=0.3)
    check(ran, faults, 4)
    check_numbers(ran, "momentum")
    gone = [event["host"] for event in ran.of("host")]
    assert sorted(gone[:2]) == ["10.77.0.3", "10.77.0.4"]
    assert gone[2:] == ["10.77.0.2"]
    assert all(end["workers"] == 4 for end in ran.ends.values())


def test_a_cut_link_under_local_sgd(tmp_path: Path) -> None:
    faults = [Fault((1, 0), 0.3), Fault((1,), 2.5, "cut", 5.0)]
    ran = on_hosts.run(tmp_path, (1, 2), faults, strategy="local-sgd:period=4", pause_s=0.25)
    check(ran, faults, 2)
    assert [event["host"] for event in ran.of("host")] == ["10.77.0.2"]
