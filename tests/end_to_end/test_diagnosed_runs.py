"""Faults in real runs: `manyhands doctor` names the culprit, from what the processes have recorded themselves."""

from pathlib import Path

import pytest

from manyhands.diagnosis import Finding, diagnose
from manyhands.telemetry.read import read
from tests.end_to_end.commands import manyhands
from tests.pages import ROOT

SCRIPT = str(ROOT / "benchmarks" / "diagnosis_worker.py")


def ran(folder: Path, launch: str, script: str) -> Path:
    words = ["--out", "run", "--threads", "1", *launch.split(), SCRIPT, *script.split()]
    done = manyhands("launch", *words, cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


def first(run: Path) -> Finding:
    """What other programs on this machine use is no fault of the run."""
    return next(finding for finding in diagnose(run) if finding.kind != "busy-host")


def test_a_worker_that_is_late_in_its_backward_pass(tmp_path: Path) -> None:
    run = ran(tmp_path, "--workers 2", "--steps 16 --fault backward --at 1 --seconds 0.15")
    finding = first(run)
    assert (finding.kind, finding.processes) == ("slow-worker", ("worker 1",))
    assert finding.numbers["excess_s"] == pytest.approx(0.15, rel=0.3)
    said = manyhands("doctor", "run", cwd=tmp_path)
    assert said.code == 0
    assert "slow-worker: worker 1 is slow in its backward pass" in said.out
    hosts = [record for record in read(run) if record["kind"] == "usage"]
    assert {"launcher", "worker 0", "worker 1"} <= set(hosts[0]["processes"])
    assert hosts[-1]["cpu_user_s"] > 0


def test_a_slow_server(tmp_path: Path) -> None:
    strategy = "parameter-server:async"
    options = f"--workers 2 --servers 1 --strategy {strategy}"
    run = ran(tmp_path, options, "--steps 16 --fault server --at 0 --seconds 0.06")
    finding = first(run)
    assert (finding.kind, finding.processes) == ("server-bound", ("server 0",))


def test_a_worker_that_waits_for_its_data(tmp_path: Path) -> None:
    run = ran(tmp_path, "--workers 2", "--steps 20 --fault input --at 0 --seconds 0.2")
    finding = first(run)
    assert (finding.kind, finding.processes) == ("input-bound", ("worker 0",))
