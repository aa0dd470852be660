"""`manyhands plan` on facts that are known: what it prints, what it refuses. Pages run it on this machine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.cli import main
from manyhands.planner import this_host
from tests.planner_facts import facts

CLUSTER = '[[hosts]]\nkind = "here"\ncount = 4\ncost_per_hour = 2.0\n[link]\ngbit_per_s = 1\n'

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def known_host(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """This host is measured already; returns what was asked for."""
    asked = []

    def measured(job: Any, **more: Any) -> SimpleNamespace:
        asked.append({"job": job, **more})
        return SimpleNamespace(facts=lambda strategy: facts())

    monkeypatch.setattr(this_host, "measured", measured)
    return asked


def test_the_table_the_paragraph_and_the_bars(capsys: Said) -> None:
    assert main(["plan", "--epochs", "3"]) == 0
    said = capsys.readouterr().out
    assert "samples/s (90 %)" in said
    assert "3 epochs" in said
    (chosen,) = (line for line in said.splitlines() if line.startswith("→"))
    assert "as one process" in chosen
    assert "█ compute" in said
    assert "A second machine like this one over 1 Gbit/s" in " ".join(said.split())


def test_everything_as_json_and_a_picture(capsys: Said, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert main(["plan", "--json", "--svg", str(picture), "--workers", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["workers"] == 2
    assert found["best"]["low"] < found["best"]["samples_per_second"] < found["best"]["high"]
    assert sum(found["best"]["terms_s"].values()) == pytest.approx(found["best"]["step_s"])
    assert picture.read_text().startswith("<svg")


def test_the_numbers_behind_each_term(capsys: Said) -> None:
    assert main(["plan", "--explain", "--strategy", "local-sgd:period=4"]) == 0
    said = capsys.readouterr().out
    assert "C = 50 + 10 · b = 370 CPU ms, κ = 1" in said
    assert "handshake, commit and records" in said


def test_a_cluster_has_curves_and_a_cheapest_way(capsys: Said, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    assert main(["plan", "--cluster", str(file), "--within", "1d"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "half is wasted at" in said
    assert "cheapest within 24.0 h" in said or "cheapest within 1.0 d" in said
    assert main(["plan", "--cluster", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 <= sum(host["count"] for host in found["best"]["hosts"]) <= 4
    assert found["cluster"]["curves"]


def test_a_script_is_measured_as_it_is(tmp_path: Path, known_host: list[dict[str, Any]]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["plan", str(script), "--lr", "0.1"]) == 0
    (asked,) = known_host
    assert asked["job"].name == "train"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--within", "2h"], "--within is for --cluster FILE"),
        (["--workers", "0"], "--workers 0: it must be above 0"),
        (["--workers", "3"], "no way is left of those asked for"),
        (["--strategy", "all-reduse"], "did you mean all-reduce"),
        (["--placement", "pipelin"], "did you mean pipeline"),
        (["--cluster", "nowhere.toml"], "cannot read the cluster file nowhere.toml"),
        (["--svg", "/nowhere/plan.svg"], "give --svg a path that can be written"),
        (["--model", "nothing"], "unknown model 'nothing'"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(words: list[str], said: str, capsys: Said) -> None:
    assert main(["plan", *words]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert said in line


def test_a_time_that_is_none(capsys: Said) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--within", "soon"])
    assert "write it as 90min, 2h or 1d" in capsys.readouterr().err


def test_a_wrong_cluster_file_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: Said, known_host: list[dict[str, Any]]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.replace("count = 4", "count = -4"))
    assert main(["plan", "--cluster", str(file)]) == 2
    assert "count = -4: it must be above 0" in capsys.readouterr().err
    assert known_host == []


def test_a_spec_file_says_how_many_epochs(capsys: Said, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[train]\nepochs = 7\n")
    assert main(["plan", str(tmp_path / "job.toml")]) == 0
    assert "7 epochs" in capsys.readouterr().out
