"""The command line as a newcomer meets it: it teaches, it refuses in one sentence, it trains, it repeats itself."""

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manyhands import cli, data
from manyhands.cluster.launchers import detect, local
from manyhands.comm.codecs import CODECS
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.data import DATASETS
from manyhands.job import known_names
from manyhands.job.optimizers import OPTIMIZERS
from manyhands.models import MODELS
from manyhands.placement import PLACEMENTS
from manyhands.strategies import PRESETS, STRATEGIES
from tests.end_to_end.commands import Done, manyhands, parameters, run, same_bits

VERBS = ("train", "launch", "plan", "probe", "export", "serve", "list", "show", "convert", "doctor", "dash")

# More flags make a command line harder to learn. Before raising a number here: would the spec file do?
FLAGS = {
    "train": 24,
    "launch": 11,
    "plan": 16,
    "probe": 8,
    "export": 3,
    "serve": 7,
    "list": 0,
    "show": 3,
    "convert": 2,
    "doctor": 0,
    "dash": 5,
}

SUMMARY = {
    *("samples_per_second", "loss", "accuracy", "steps", "samples", "workers", "bytes_sent", "wall_s"),
    *("epochs", "hosts", "strategy", "placement", "shared_bytes", "committed", "top5", "classes"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory for commands that run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    detect._found.cache_clear()
    yield tmp_path
    detect._found.cache_clear()


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Done:
    """Run a command in this process: as the installed one does, without the time to start it."""
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return Done(code=code, out=said.out, err=said.err)


# It teaches


def test_the_installed_command_says_what_it_can_do(tmp_path: Path) -> None:
    done = manyhands("--help", cwd=tmp_path)
    assert done.code == 0
    assert done.err == ""
    for verb in VERBS:
        assert verb in done.out
    assert manyhands(cwd=tmp_path).out == done.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, verb, "--help")
    assert done.code == 0
    _, _, examples = done.out.partition("examples:")
    assert examples.count(f"manyhands {verb}") >= 2


def test_verbs_and_flags_are_few() -> None:
    verbs = next(
        action for action in cli.build()._actions if isinstance(action, argparse._SubParsersAction)
    ).choices
    flags = {
        verb: sum(bool(action.option_strings) and action.dest != "help" for action in parser._actions)
        for verb, parser in verbs.items()
    }
    assert flags == FLAGS


def test_hosts_are_for_strategies_that_step_together(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "script.py").touch()
    words = ["--hosts", "2@127.0.0.1", "--strategy", "hogwild", "script.py"]
    done = call(capsys, "launch", *words)
    assert done.code == 2
    assert "and hogwild is not one of them" in done.err
    assert "and hogwild is not one of them" in call(capsys, "train", *words[:-1]).err
    assert "like 2@10.0.0.1" in call(capsys, "launch", "--hosts", "two", "script.py").err
    assert "at least 1 host" in call(capsys, "train", "--hosts", "0").err
    for elsewhere in ("192.0.2.1", "192.0.2.1:29400", "no.such.name.invalid:29400"):
        done = call(capsys, "train", "--hosts", f"2@{elsewhere}")
        assert f"{elsewhere.partition(':')[0]} is no address of this host" in done.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1" in call(capsys, "train", "--hosts", f"2@127.0.0.1:{port}").err


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("strategies", [*STRATEGIES, *TOPOLOGIES, *PRESETS]),
        ("placements", [*PLACEMENTS]),
        ("codecs", [*CODECS]),
        ("models", [*MODELS, "package.module:callable"]),
        ("data", [*DATASETS, "package.module:callable"]),
    ],
)
def test_list_names_everything(what: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, "list", what)
    assert done.code == 0
    lines = done.out.splitlines()
    assert len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert re.match(rf"(topology=)?{re.escape(name)}[:\s]", line), (
            "the name comes first, for grep and cut"
        )
        assert len(line.split()) > 3, "one line on each"
    assert "=None" not in done.out, "nobody can type that"
    assert "=()" not in done.out


@pytest.mark.parametrize("columns", [30, 60, 120])
@pytest.mark.parametrize("what", ["strategies", "placements", "codecs", "models", "data"])
def test_on_a_terminal_lists_have_headings_and_whole_words(
    what: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = set(call(capsys, "list", what).out.split())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = call(capsys, "list", what).out.splitlines()
    headings = ["strategies", "topologies of all-reduce", "presets"] if what == "strategies" else [what]
    assert [line for line in lines if line in headings] == headings
    assert set(" ".join(lines).split()) == words | set(" ".join(headings).split()), "no word is cut"
    assert all(len(line) <= columns or len(line.split()) <= 2 for line in lines)


def test_python_m_is_the_command(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "manyhands", "train", "--epochs", "0"], tmp_path)
    assert done.refusal() == "error: --epochs 0: it must be at least 1"


def test_the_launcher_knows_the_names_without_the_tables() -> None:
    assert set(MODELS) == known_names.MODELS
    assert set(DATASETS) == known_names.DATA
    assert set(OPTIMIZERS) == known_names.OPTIMIZERS


# It refuses


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    done = call(capsys, *arguments)
    refusal = done.refusal()
    for word in words:
        assert word in refusal
    assert done.err == f"{refusal}\n"
    assert sorted(os.listdir()) == ["folder", "notes.txt", "spec.toml", "wrong.toml"], "something was left"


@pytest.fixture
def files(here: Path) -> Path:
    (here / "spec.toml").write_text("[train]\nbatchsize = 3\n")
    (here / "wrong.toml").write_text("[train\n")
    (here / "notes.txt").write_text("not a directory, not an archive")
    (here / "folder").mkdir()
    return here


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("fly", ["'fly'", "train", "doctor"]),
        ("train --wokers 2", ["--wokers", "did you mean --workers?", "manyhands train --help"]),
        ("train --workers two", ["--workers", "'two'", "manyhands train --help"]),
        ("train --workers 0", ["--workers 0: it must be at least 1"]),
        ("train --workers -1", ["--workers -1: it must be at least 1"]),
        ("train --threads 0", ["--threads 0: it must be at least 1"]),
        ("train --batch 0", ["--batch 0: it must be at least 1"]),
        ("train --epochs 0", ["--epochs 0:"]),
        ("train --model nope", ["'nope'", *MODELS, "package.module:callable"]),
        ("train --data cifar", ["did you mean cifar10?"]),
        ("train --optimizer sdg:lr=1", ["'sdg'", *OPTIMIZERS]),
        ("train --steps -3", ["--steps -3:"]),
        ("train --seed 99999999999999999999", ["--seed 99999999999999999999:"]),
        ("train --device tpu", ["'tpu'", "cpu", "cuda"]),
        ("train --resume", ["--resume needs --out"]),
        ("train --resume --out folder", ["no checkpoint in folder"]),
        ("train --resume --out absent", ["no checkpoint in absent"]),
        ("train --save-every 5", ["--save-every 5:", "500 steps"]),
        ("train --keep 0", ["--keep 0:"]),
        ("train --out notes.txt", ["notes.txt", "--out"]),
        ("train --out notes.txt/run", ["notes.txt/run", "Not a directory", "--out"]),
        ("train --strategy nope", ["'nope'", *STRATEGIES]),
        ("train --strategy all-reduce:topology=star", ["'star'", "native", *TOPOLOGIES]),
        ("train --strategy all-reduce:speed=3", ["'speed'", "topology"]),
        ("train --strategy all-reduce:ring", ["key=value", "'ring'"]),
        ("train --placement nope", ["'nope'", *PLACEMENTS]),
        (
            "train --placement pipeline:schedule=1f2b",
            ["'1f2b'", "gpipe", "1f1b", "interleaved", "zero-bubble"],
        ),
        (
            "train --placement hybrid:pipeline=2,tensor=2 --workers 6",
            ["2 stages × 2 ways = 4 workers", "6 = 1 × 4 + 2", "--workers 4 or 8"],
        ),
        ("train --placement pipeline:stages=3,split=fc", ["2 stages", "name 2 layers"]),
        ("train --placement tensor --strategy hogwild --workers 4", ["take every step together"]),
        ("train --placement tensor --strategy parameter-server --servers 1 --workers 4", ["servers"]),
        ("launch --placement tensor:ways=3 notes.txt", ["2 workers cannot form replicas of 3 ways"]),
        ("train --strategy single", ["1 worker, not 2", "--workers 1"]),
        ("train absent.toml", ["absent.toml", "No such file"]),
        ("train folder", ["folder", "directory"]),
        ("train spec.toml", ["spec.toml", "'batchsize'", "batch", "accumulate"]),
        ("train wrong.toml", ["wrong.toml", "not valid TOML", "line 1"]),
        ("launch", ["script.py"]),
        ("launch absent.py", ["'absent.py'"]),
        ("launch folder", ["'folder'"]),
        ("launch --workers 0 notes.txt", ["--workers 0: it must be at least 1"]),
        ("launch --threads 0 notes.txt", ["0 threads"]),
        ("launch --strategy parameter-server:copies=1 --servers 1 notes.txt", ["copies=1", "--hosts"]),
        ("launch --strategy parameter-server:copies=2 --servers 1 notes.txt", ["copies=2", "0 or 1"]),
        ("launch --strategy nope notes.txt", ["'nope'", *STRATEGIES]),
        ("launch --strategy single notes.txt", ["1 worker, not 2"]),
        ("launch --out notes.txt notes.txt", ["notes.txt", "--out"]),
        ("list", ["strategies", "placements", "codecs", "models", "data"]),
        ("list colours", ["'colours'", "strategies", "placements", "codecs", "models", "data"]),
        ("convert out.lmdb", ["--data"]),
        ("convert --data digits notes.txt", ["notes.txt exists"]),
        ("convert --data digits notes.txt/out.lmdb", ["notes.txt/out.lmdb"]),
        ("convert --data nope out.lmdb", ["'nope'", *DATASETS]),
        ("convert --data images:absent out.lmdb", ["absent is not a folder"]),
        ("convert --data images:folder out.lmdb", ["folder holds 0 pictures"]),
        ("convert --data digits --size 0 out.lmdb", ["size", "0"]),
    ],
)
def test_refusals_before_anything_starts(
    arguments: str, words: list[str], files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, arguments.split(), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model nope", ["'nope'", *MODELS, "package.module:callable"]),
        ("--model mlp:width=3", ["'width'", "hidden"]),
        ("--model mlp:hidden=x", ["mlp:hidden=x", "whole number"]),
        ("--model mlp:hidden=0", ["mlp:hidden=0"]),
        ("--model json:nothing", ["'nothing'", "json"]),
        ("--model nowhere.to_be:found", ["cannot import", "nowhere"]),
        ("--model os:getcwd", ["str", "torch.nn.Module"]),
        ("--data nope", ["'nope'", *DATASETS, "package.module:callable"]),
        ("--data digits:3", ["digits takes nothing"]),
        ("--data synthetic:1x8x8:2,speed=3", ["'speed'", "samples", "noise"]),
        ("--data npz:absent.npz", ["absent.npz"]),
        ("--data npz:notes.txt", ["notes.txt", "numpy archive"]),
        ("--data lmdb:notes.txt", ["notes.txt", "LMDB"]),
        ("--data images:absent", ["absent is not a folder"]),
        ("--data text:absent.txt", ["absent.txt"]),
        ("--data mnist", ["mnist is not on this machine", "--fetch"]),
        ("--model vgg16", ["32×32", "8×8", "cnn"]),
        ("--model lstm", ["sequences", "1×8×8"]),
        ("--data text:notes.txt,length=8", ["notes.txt has", "longer text"]),
        ("--data text:notes.txt,length=2", ["cnn takes images", "lstm"]),
        ("--optimizer nope", ["'nope'", *OPTIMIZERS]),
        ("--optimizer sgd:speed=3", ["'speed'", "momentum", "lr"]),
        ("--optimizer sgd:lr=fast", ["sgd:lr=fast", "expected a number"]),
        ("--optimizer sgd:lr=-1", ["sgd:lr=-1", "learning rate"]),
        ("--optimizer sgd:nesterov=maybe", ["nesterov=maybe", "true or false"]),
        ("--optimizer adam:betas=0.9", ["betas=0.9", "2 numbers"]),
        ("--optimizer sgd:0.1", ["key=value", "'0.1'"]),
        ("--device cuda", ["no GPU", "--device cpu"]),
    ],
)
def test_refusals_of_a_worker(
    arguments: str,
    words: list[str],
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setenv("MANYHANDS_DATA", str(files / "folder"))
    monkeypatch.setenv(local.RANK, "0")
    monkeypatch.setenv(local.SIZE, "1")
    refused(capsys, ["train", *arguments.split()], words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("--model vgg16", ["32×32", "8×8", "cnn"]), ("--data nope", ["'nope'", *DATASETS])],
)
def test_what_workers_refuse_the_launcher_says_once(arguments: str, words: list[str], tmp_path: Path) -> None:
    refusal = manyhands("train", *arguments.split(), cwd=tmp_path).refusal()
    for word in words:
        assert word in refusal
    assert os.listdir(tmp_path) == [], "a run that never began leaves no directory"


# It trains, and repeats itself


@dataclass(frozen=True, kw_only=True)
class Run:
    done: Done
    out: Path
    summary: dict[str, float]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The default job, as the first command of the README runs it."""
    folder = tmp_path_factory.mktemp("default")
    done = manyhands("train", "--json", "--tensorboard", "--out", "run", cwd=folder)
    assert done.code == 0, done.err
    return Run(done=done, out=folder / "run", summary=json.loads(done.out))


def test_the_default_job_learns(default_run: Run) -> None:
    assert default_run.summary["accuracy"] >= 0.97
    assert default_run.summary["workers"] == 2
    assert default_run.summary["samples"] == 12 * 1437
    assert default_run.summary["samples_per_second"] > 0


def test_a_run_is_a_directory(default_run: Run) -> None:
    out = default_run.out
    assert json.loads((out / "summary.json").read_text()) == default_run.summary
    assert default_run.summary.keys() == SUMMARY
    plan = json.loads((out / "plan.json").read_text())
    assert (plan["model"], plan["data"], plan["cluster"]["workers"]) == ("cnn", "digits", 2)
    assert (out / "checkpoints" / "latest").exists()
    for rank in range(2):
        lines = (out / "events" / f"worker-{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 277))
        assert {record["rank"] for record in records} == {rank}
        assert {"start", "step", "evaluate", "checkpoint", "process", "end"} <= {
            record["kind"] for record in records
        }


def test_progress_goes_to_standard_error(default_run: Run) -> None:
    assert "2 workers × 1 thread" in default_run.done.err
    for word in ("epoch 12/12", "loss", "samples/s", "accuracy"):
        assert word in default_run.done.err


def test_tensorboard_reads_the_event_files(default_run: Run) -> None:
    folders = {path.parent for path in default_run.out.rglob("events.out.tfevents.*")}
    assert folders
    tags: set[str] = set()
    for folder in folders:
        events = EventAccumulator(str(folder))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            tags.add(tag)
            if "accuracy" in tag:
                assert events.Scalars(tag)[-1].value == pytest.approx(default_run.summary["accuracy"])
    assert any("loss" in tag for tag in tags)
    assert any("accuracy" in tag for tag in tags)


def test_the_same_plan_gives_the_same_bits(default_run: Run, tmp_path: Path) -> None:
    done = manyhands("train", str(default_run.out / "plan.json"), "--out", "again", cwd=tmp_path)
    assert done.code == 0, done.err
    assert same_bits(parameters(tmp_path / "again"), parameters(default_run.out))
    assert "accuracy" in done.out
    assert "samples   17,244 = 12 epochs, each used once\n" in done.out
    assert re.search(r"^speed .* samples/s with 2 workers .*, without evaluation and saving$", done.out, re.M)
    assert re.search(r"^took      [\d.]+ s without the start, 276 steps$", done.out, re.M)
    assert "learning rate" not in done.err, "the plan has an optimizer"
    assert "manyhands train again/plan.json" in done.out


def test_a_resumed_run_gives_the_same_bits(default_run: Run, tmp_path: Path) -> None:
    cut = manyhands("train", "--steps", "30", "--out", "run", cwd=tmp_path)
    assert cut.code == 0, cut.err
    record = json.loads(next((tmp_path / "run").glob("checkpoints/step-*/record.json")).read_text())
    again = manyhands("train", "--steps", "276", "--out", "run", cwd=tmp_path)
    assert "--resume" in again.refusal()
    done = manyhands("train", "--epochs", "12", "--out", "run", "--resume", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert same_bits(parameters(tmp_path / "run"), parameters(default_run.out))
    assert json.loads(done.out)["samples"] == default_run.summary["samples"]
    assert record["steps"] == 30
    assert record["committed"] == [[0, 7 * 64]], "the cut was in the middle of an epoch"
    assert "samples   1,885 of 2 epochs, each used once; 989 of epoch 2 are left\n" in cut.out
    assert done.err.count("going on from run/checkpoints/step-00000030 (epoch 2)\n") == 1
    epochs = [{"epoch": epoch, "once": 1437, "twice": 0, "never": 0} for epoch in range(12)]
    assert json.loads(done.out)["committed"]["epochs"] == epochs
    more = manyhands(
        "train", "--epochs", "13", "--workers", "4", *["--out", "run", "--resume", "--json"], cwd=tmp_path
    )
    assert more.code == 0, more.err
    summary = json.loads(more.out)
    assert (summary["epochs"], summary["samples"], summary["steps"]) == (13, 13 * 1437, 276 + 12)
    again = manyhands("train", *["--out", "run", "--resume", "--json"], cwd=tmp_path)
    assert "all of the plan is done already" in again.err
    assert json.loads(again.out)["steps"] == 276 + 12


def test_a_resumed_run_refuses_another_model_and_stays_as_it_was(default_run: Run) -> None:
    before = (default_run.out / "plan.json").read_text()
    out = ["--out", default_run.out.name, "--resume"]
    refusal = manyhands("train", "--model", "mlp", *out, cwd=default_run.out.parent).refusal()
    assert "another model" in refusal
    assert (default_run.out / "plan.json").read_text() == before


MY_MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build(shape, classes):
    print("a word of the model")
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], classes))

def make():
    targets = torch.arange(90) % 3
    inputs = torch.zeros(90, 2, 3)
    inputs[torch.arange(90), 0, targets] = 1.0
    return TensorDataset(inputs[:60], targets[:60]), TensorDataset(inputs[60:], targets[60:])
"""


def test_own_model_and_data_beside_the_user(tmp_path: Path) -> None:
    (tmp_path / "mymodule.py").write_text(MY_MODULE)
    (tmp_path / "job.toml").write_text(
        "[model]\nname = 'mymodule:build'\n[data]\nname = 'mymodule:make'\n"
        "[train]\nepochs = 9\nbatch = 5\naccumulate = 4\nschedule = 'cosine'\noptimizer = 'sgd:lr=0.5'"
    )
    done = manyhands("train", "job.toml", "--epochs", "3", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    summary = json.loads(done.out)  # and not what the model printed
    assert "a word of the model" in done.err
    assert summary["accuracy"] == 1.0
    # 12 batches of 5 over 2 workers, 4 batches to a step: 2 steps to an epoch, the second one short
    assert (summary["steps"], summary["samples"]) == (6, 3 * 60)


def test_a_held_out_loss_that_is_no_number_stays_json(tmp_path: Path) -> None:
    arguments = ["--optimizer", "sgd:lr=1e30", "--steps", "1", "--workers", "1", "--model", "mlp"]
    done = manyhands("train", *arguments, "--json", "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["loss"] is None
    assert done.err.count("accuracy") == 1


# It converts


def test_pictures_become_an_lmdb_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (here / "photos" / kind).mkdir(parents=True)
        for number in range(10):
            pixels = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(here / "photos" / kind / f"{number}.png")
    done = call(capsys, "convert", "--data", "images:photos", "--size", "8", "out.lmdb")
    assert done.code == 0, done.err
    assert "18 samples to train on and 2 to test with, 3×8×8, 2 classes" in done.out
    assert "manyhands train --data lmdb:out.lmdb" in done.out
    assert sorted(os.listdir()) == ["out.lmdb", "photos"]
    pictures, converted = data.load("images:photos", size=8), data.load("lmdb:out.lmdb")
    for one, other in ((pictures.train, converted.train), (pictures.test, converted.test)):
        everything = torch.arange(len(one))
        for left, right in zip(
            data.gather(one, everything, 0), data.gather(other, everything, 0), strict=True
        ):
            assert torch.equal(left, right)


def test_a_run_says_which_folders_it_trains_on_and_tests_with(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "val"):
        for kind in ("cat", "dog", "eel"):
            (here / "photos" / part / kind).mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (8, 8)).save(here / "photos" / part / kind / f"{number}.png")
    said = "photos: training on train, testing with val"
    done = call(capsys, "convert", "--data", "images:photos", "out.lmdb")
    assert said in done.err
    assert "6 samples to train on and 6 to test with, 3×8×8, 3 classes" in done.out
    done = manyhands(
        *("train", "--data", "images:photos", "--model", "mlp", "--workers", "1", "--steps", "1"), cwd=here
    )
    assert done.code == 0, done.err
    assert done.err.count(said) == 1


def test_a_broken_picture_leaves_no_half_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, kind in enumerate(("cat", "dog", "eel")):
        (here / "photos" / kind).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(here / "photos" / kind / "good.png")
        if number == 2:
            (here / "photos" / kind / "torn.png").write_bytes(b"\x89PNG and then nothing")
    done = call(capsys, "convert", "--data", "images:photos", "out.lmdb")
    assert "torn.png is not a picture" in done.refusal()
    assert os.listdir() == ["photos"]
