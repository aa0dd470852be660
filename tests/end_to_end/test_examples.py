"""Every example runs as its first lines say, if only for a few steps."""

import json
import sys
from pathlib import Path

import numpy as np

from tests.end_to_end.commands import clean_environment, manyhands, run
from tests.end_to_end.made_up_data import cifar10
from tests.pages import ROOT

EXAMPLES = ROOT / "examples"


def test_no_example_is_forgotten() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert names == {
        *("digits.py", "digits.ipynb", "gan.py", "own_model.py", "cifar10.toml", "language_model.toml"),
        *("prepared_digits.py", "fit_digits.py", "lightning_digits.py", "trainer_digits.py"),
        *("lstm_layers.toml", "googlenet_branches.toml"),
    }


def test_the_script_runs_alone_saves_and_goes_on_with_two_workers(tmp_path: Path) -> None:
    script = str(EXAMPLES / "digits.py")
    options = ["--batch", "128", "--checkpoints", "kept"]
    done = run([sys.executable, script, "--epochs", "1", *options], tmp_path)
    assert done.code == 0, done.err
    assert done.out.startswith("epoch 1 ")
    done = manyhands(
        "launch", "--workers", "2", "--out", "out", script, "--epochs", "2", *options, cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert "[worker 0] epoch 2 " in done.out
    assert "[worker 0] epoch 1 " not in done.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["workers"] == 2
    assert summary["samples"] == 2 * 1437


def test_a_gan_trains_both_its_models(tmp_path: Path) -> None:
    asked = ["--workers", "2", "--strategy", "parameter-server:sync", "--servers", "1", "--out", "out"]
    done = manyhands("launch", *asked, str(EXAMPLES / "gan.py"), "--epochs", "1", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "[worker 0] epoch 1  discriminator " in done.out
    found = [json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("summary", "summary-2")]
    assert [one["samples"] for one in found] == [1437, 1437]


def test_own_model_and_data(tmp_path: Path) -> None:
    names = ["--model", "own_model:build", "--data", "own_model:make", "--optimizer", "adam:lr=0.01"]
    done = manyhands("train", *names, "--json", "--out", str(tmp_path), cwd=EXAMPLES)
    assert done.code == 0, done.err
    assert json.loads(done.out)["accuracy"] > 0.9


def test_the_language_model_learns_from_our_own_page(tmp_path: Path) -> None:
    spec = str(EXAMPLES / "language_model.toml")
    done = manyhands("train", spec, "--steps", "12", "--json", "--out", str(tmp_path), cwd=ROOT)
    assert done.code == 0, done.err
    assert json.loads(done.out)["loss"] < np.log(256)


def test_layers_and_branches_on_different_workers(tmp_path: Path) -> None:
    options = ["--steps", "2", "--json"]
    for name in ("lstm_layers", "googlenet_branches"):
        spec = str(EXAMPLES / f"{name}.toml")
        done = manyhands("train", spec, *options, "--out", str(tmp_path / name), cwd=ROOT)
        assert done.code == 0, done.err
        assert json.loads(done.out)["steps"] == 2


def test_cifar10_in_its_official_form(tmp_path: Path) -> None:
    cifar10(tmp_path / "data")
    command = [str(Path(sys.executable).parent / "manyhands"), "train", str(EXAMPLES / "cifar10.toml")]
    options = ["--workers", "2", "--steps", "2", "--json", "--out", "out"]
    done = run([*command, *options], tmp_path, clean_environment(MANYHANDS_DATA=str(tmp_path / "data")))
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["train"]["augment"]
