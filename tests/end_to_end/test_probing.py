"""Probing with real runs: what cannot run is marked, and a run that `auto` chose is held against its prediction."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.lab import emulated_hosts
from manyhands.planner import measure, splits
from manyhands.planner.jobs import of_script
from tests.end_to_end.commands import BIN, TIMEOUT_S, clean_environment

WHY_NOT = emulated_hosts.available()

SCRIPT = """
import os, signal, torch
import manyhands as mh

if torch.get_num_threads() == 2:
    os.kill(os.getpid(), signal.SIGILL)

model = torch.nn.Linear(16, 16)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda m, x: m(x).square().mean())
if mh.workers() == 2:
    raise MemoryError("no room for another worker")
data = torch.rand(64, 16)
while True:
    for batch in session.batches(data, batch_size=8):
        session.step(batch)
"""

QUICK = """
import sys
from manyhands.planner import measure
measure.ROUNDS_S = 1.0
from manyhands.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.timeout(300)  # a few seconds on an idle machine, minutes where others use all cores
def test_a_split_that_cannot_run_is_marked_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(splits, "usable_cores", lambda: 2)
    found = measure.probe_host(of_script([str(script)], "script"), seconds=1.0)
    errors = {f"{one.processes} × {one.threads}": one.error for one in found.host.splits}
    assert "SIGILL" in errors["1 × 2"]
    assert "no room for another worker" in errors["2 × 1"]
    assert errors["1 × 1"] == ""
    assert found.chosen == "1 × 1"
    assert found.model.parameters == 272
    assert found.batch == 8
    fitted = found.host.splits[-1]
    assert fitted.measured_batches == (4, 8)
    assert 0 < fitted.pass_cpu_s.value + 8 * fitted.sample_cpu_s.value < 0.1


@pytest.mark.timeout(300)
def test_a_run_that_was_chosen_says_how_its_prediction_went(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "--strategy", "auto", "--workers", "auto", "--model", "mlp", "--steps", "60"]
    environ = clean_environment(XDG_CACHE_HOME=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", QUICK, *words, "--out", str(out), "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("auto ")]
    assert "since it was not measured before" in said[0]
    assert "samples/s predicted" in said[1]
    planned = json.loads(done.stdout)["planned"]
    assert planned["low"] < planned["predicted_samples_per_second"] < planned["high"]
    assert planned["measured_terms_s"]["compute"] > 0
    assert planned["is_inside"] == (
        planned["low"] <= planned["measured_samples_per_second"] <= planned["high"]
    )
    plan = json.loads((out / "plan.json").read_text())
    assert plan["auto"] == []
    assert plan["cluster"]["threads"] >= 1
    ledger = (tmp_path / "manyhands" / "predictions.jsonl").read_text()
    assert ledger == (out / "predictions.jsonl").read_text()
    assert json.loads(ledger)["way"] == planned["way"]


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_links_are_measured_between_hosts(tmp_path: Path) -> None:
    out = tmp_path / "links"
    with emulated_hosts.EmulatedHosts(2, bandwidth_mbit=400) as net:

        def start(host: int, *words: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [*net.command_prefix(host), str(BIN / "manyhands"), *words],
                cwd=tmp_path,
                env=clean_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        with start(0, "probe", "--hosts", f"2@{net.address(0)}", "--out", str(out), "--json") as first:
            while not (out / "join.json").exists() and first.poll() is None:
                time.sleep(0.1)
            with start(1, "launch", "--join", str(out)) as second:
                printed, said = first.communicate(timeout=TIMEOUT_S)
                second.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, said
    link = json.loads(printed)["link"]
    assert 1 / link["s_per_byte"]["value"] == pytest.approx(400e6 / 8, rel=0.25)
    assert 0 < link["latency_s"]["value"] < 0.01


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            ["train", "--strategy", "auto", "--hosts", "2@127.0.0.1"],
            "--strategy auto measures before the other hosts",
        ),
        (["train", "--threads", "auto", "--device", "cuda"], "--threads auto measures processors"),
        (["launch", "--join", "runs/a", "--workers", "auto"], "--workers auto: the run that --join enters"),
        (["probe", "--model", "mlp", "script.py"], "--model is for declared jobs"),
        (["probe", "--hosts", "2"], "--hosts needs --out DIR"),
        (["probe", "--hosts", "2", "--model", "mlp"], "leave model out with --hosts"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    words: list[str], refusal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "last_value", None, raising=False
    )  # which a refusal leaves for what runs at exit
    from manyhands.cli import main

    assert main(words) == 2
    assert refusal in " ".join(capsys.readouterr().err.split())
