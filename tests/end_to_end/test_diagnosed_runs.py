"""Faults in real runs: `manyhands doctor` names the culprit, from what the processes have recorded themselves."""

import json
from pathlib import Path

import pytest

from manyhands.diagnosis import Finding, diagnose
from manyhands.telemetry.read import read
from tests.end_to_end.commands import manyhands, parameters
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


def test_layers_and_classes_are_recorded_and_no_bit_of_the_run_is_another(tmp_path: Path) -> None:
    """`train` counts by class; with `watch_layers` it looks at weights and gradients as well."""
    for name, words in (("plain", ""), ("watched", "watch_layers = 2\n")):
        (tmp_path / f"{name}.toml").write_text(f"[train]\nsteps = 5\n{words}")
        done = manyhands("train", f"{name}.toml", "--out", name, cwd=tmp_path)
        assert done.code == 0, done.err
    plain, watched = (parameters(tmp_path / name) for name in ("plain", "watched"))
    assert all(value.equal(watched[name]) for name, value in plain.items())
    records = list(read(tmp_path / "watched"))
    layers = [record for record in records if record["kind"] == "layers"]
    assert [record["step"] for record in layers] == [2, 4]
    assert {f"model/{layer['name']}" for layer in layers[0]["layers"]} == plain.keys()
    assert all(layer["gradient_norm"] > 0 for layer in layers[0]["layers"])
    (classes,) = [record for record in records if record["kind"] == "classes"]
    summary = json.loads((tmp_path / "watched" / "summary.json").read_text())
    assert sum(map(sum, classes["confusion"])) == sum(row["samples"] for row in summary["classes"])
    assert (classes["accuracy"], classes["top5"]) == (summary["accuracy"], summary["top5"])
    assert not [record for record in read(tmp_path / "plain") if record["kind"] == "layers"]


def test_a_worker_that_waits_for_its_data(tmp_path: Path) -> None:
    run = ran(tmp_path, "--workers 2", "--steps 20 --fault input --at 0 --seconds 0.2")
    finding = first(run)
    assert (finding.kind, finding.processes) == ("input-bound", ("worker 0",))
