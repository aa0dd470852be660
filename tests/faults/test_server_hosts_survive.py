"""Servers on hosts that come and go: what one of them had is on another host too, or the run ends and says so."""

from pathlib import Path

import pytest
import torch

from manyhands.lab import emulated_hosts
from tests.faults import checks, on_hosts, training
from tests.faults.on_hosts import Fault

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

BATCH = 8


def test_a_server_dies_and_then_a_host_with_another(tmp_path: Path) -> None:
    """Parameters and the optimizer's state come from copies: one process that made the same steps has the same."""
    faults = [Fault((1, 1), 0.3), Fault((2,), 2.0, "host")]
    ran = on_hosts.run(
        tmp_path,
        (1, 1, 1),
        faults,
        strategy="parameter-server:sync,copies=1",
        servers=(1, 1, 1),
        optimizer="Adam",
        pause_s=0.2,
    )
    assert len(ran.ends) == 2, ran.said
    checks.nothing_lost(ran, ran.fired, faults)
    checks.one_history(ran, "Adam")
    (server,) = ran.of("server")
    assert (server["host"], server["how"]) == ("10.77.0.2", "killed by SIGKILL")
    assert f"server {server['rank']} of host 10.77.0.2 died (killed by SIGKILL): noticed after " in ran.said
    (host,) = ran.of("host")
    ((worker,), (server_there,)) = host["ranks"], host["servers"]
    assert host["host"] == "10.77.0.3"
    assert f"with worker {worker} and server {server_there}: noticed after " in ran.said


def test_every_update_that_a_worker_was_told_of_is_there(tmp_path: Path) -> None:
    """Each sample's updates are counted in the parameters themselves: a step that was cut may be made again, and none
    is lost."""
    faults = [Fault((1,), 0.5, "vanish")]
    ran = on_hosts.run(
        tmp_path,
        (1, 2),
        faults,
        strategy="parameter-server:async,copies=1",
        servers=(1, 2),
        optimizer="plain",
        counts=True,
        lr=1.0,
        pause_s=0.1,
    )
    assert len(ran.ends) == 1, ran.said
    checks.nothing_lost(ran, ran.fired, faults)
    assert [len(event["servers"]) for event in ran.of("host")] == [2]
    counts = training.counted(ran.parameters(0))
    assert float(counts.min()) == checks.EPOCHS, "no update is lost"
    again = (counts > checks.EPOCHS).any(dim=1)
    assert int(again.sum()) <= 3 * BATCH, "at most the step that each worker was in"
    assert float(counts.max()) <= checks.EPOCHS + 1
    assert torch.equal(counts, counts.round())


def test_a_host_with_a_server_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    """What it has by then is old: it takes everything over from the others."""
    faults = [Fault((1,), 0.5, "cut", 5.0)]
    ran = on_hosts.run(
        tmp_path,
        (1, 1),
        faults,
        strategy="parameter-server:stale,bound=2,copies=1",
        servers=(1, 1),
        optimizer="plain",
        counts=True,
        lr=1.0,
        pause_s=0.2,
    )
    assert len(ran.ends) == 2, ran.said
    checks.nothing_lost(ran, ran.fired, faults)
    assert all(end["workers"] == 2 for end in ran.ends.values())
    counts = ran.parameters(0)
    assert float(counts.min()) == checks.EPOCHS, "no update is lost"
    assert float(counts.max()) <= checks.EPOCHS + 1


def test_without_copies_a_lost_server_ends_the_run(tmp_path: Path) -> None:
    faults = [Fault((1,), 0.3, "host")]
    ran = on_hosts.run(
        tmp_path,
        (1, 1),
        faults,
        strategy="parameter-server:sync",
        servers=(1, 1),
        code=2,
        pause_s=0.2,
    )
    assert ran.fired == faults
    assert ran.said.splitlines()[-1] == (
        "error: 18% of the parameters were on servers that are gone, and with copies=0 no other server has them; with "
        "copies=1 a server on another host has them too: go on from the last checkpoint (--resume, or session.resume "
        "in a script)"
    )
    assert "Traceback" not in ran.said


def test_what_asynchronous_workers_end_with_has_the_same_bits_everywhere(tmp_path: Path) -> None:
    """Adam makes large steps of small differences: a worker that kept older values would end far from the others."""
    faults = [Fault((1, 1), 0.3), Fault((2,), 2.0, "cut", 4.0)]
    ran = on_hosts.run(
        tmp_path,
        (1, 1, 1),
        faults,
        strategy="parameter-server:async,copies=1",
        servers=(1, 1, 1),
        optimizer="Adam",
        lr=0.002,
        pause_s=0.2,
    )
    assert len(ran.ends) == 3, ran.said
    checks.nothing_lost(ran, ran.fired, faults)
    assert len(ran.of("server")) == len(ran.of("host")) == 1
    assert {end["workers"] for end in ran.ends.values()} == {3}
