"""What a person may expect of `manyhands launch`: modules, a debugger, logs, ranks before the session, clear words."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.cluster.launchers import detect
from tests.end_to_end.commands import BIN, clean_environment, last_error, manyhands, run
from tests.end_to_end.test_cli import call
from tests.faults.test_run import descendants, is_gone, wait_until

BEFORE = """
import os, shutil, sys, time
from pathlib import Path
import torch
import manyhands as mh

rank = mh.rank()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
assert [os.environ[name] for name in names] == [str(rank), str(mh.workers())] * 2
assert "MASTER_ADDR" not in os.environ
with mh.main_process_first():
    if rank == 0:
        time.sleep(0.5)
        assert not list(Path().glob("came-*"))
        Path("data").write_text("downloaded")
    assert Path("data").read_text() == "downloaded"
    Path(f"came-{rank}").touch()
"""

SESSION = """
lines, columns = os.popen("stty size", "r").read().split()  # as progress bars ask
try:
    input()
except EOFError:
    print("nothing to read", columns, flush=True)
model = torch.nn.Linear(3, 1)
session = mh.session(
    model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
)
assert (mh.rank(), mh.workers()) == (session.rank, session.workers)
print("args", sys.argv[1:], __name__, flush=True)
print("to the error stream of", rank, file=sys.stderr, flush=True)
for batch in session.batches([torch.ones(3)] * 16, batch_size=4):
    session.step(batch)
"""


def test_a_module_with_ranks_a_terminals_size_one_that_goes_first_and_logs(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(BEFORE + SESSION)
    done = manyhands("launch", "--out", "run", "-m", "mine.train", "--lr", "0.1", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("args ['--lr', '0.1'] __main__") == 2
    assert done.out.count("nothing to read 80") == 2
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"worker-{rank}.log").read_text().splitlines()
        assert sorted(log) == sorted(
            ["nothing to read 80", "args ['--lr', '0.1'] __main__", f"to the error stream of {rank}"]
        )
    refused = manyhands("launch", "-m", "mine", cwd=tmp_path).refusal()
    assert "'mine' is a package without a __main__; name a module in it, as mine.train" in refused


def test_who_goes_first_in_a_world_of_another_launcher(tmp_path: Path) -> None:
    script = BEFORE.replace('assert "MASTER', '"MASTER').replace("assert [os", "[os") + 'print("done")\n'
    (tmp_path / "script.py").write_text(script)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    done = run([*torchrun, "--rdzv-endpoint", "localhost:0", "script.py"], tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("done") == 2


ALONE = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
print("trained", flush=True)
"""


def test_a_forgotten_session_is_said_and_fails(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ALONE)
    done = manyhands("launch", "script.py", cwd=tmp_path)
    assert done.code == 64
    last = last_error(done.err)
    assert last.startswith("error: 2 workers have trained, each alone: ")
    assert "session = mh.session(model, optimizer, loss)" in last
    assert "session.step(batch)" in last
    (tmp_path / "script.py").write_text("print('no training here')")
    done = manyhands("launch", "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "note: the script ran 2 times, each by itself: it made no session" in done.err


DEBUGGED = """
import manyhands as mh
answer = 40
print("worker", mh.rank(), "is here", flush=True)
if mh.rank() == 1:
    breakpoint()
    print("you said", input("well? "), flush=True)
"""


def test_a_worker_with_the_terminal_can_be_debugged(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DEBUGGED)
    done = subprocess.run(
        [str(BIN / "manyhands"), "launch", "--debug", "1", "--out", "run", "script.py"],
        cwd=tmp_path,
        env=clean_environment(),
        input="p answer + 2\nc\nthank you\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    assert "you said thank you" in done.stdout
    assert "worker 1 is here" in done.stdout
    assert "worker 0 is here" not in done.stdout + done.stderr
    assert (tmp_path / "run" / "logs" / "worker-0.log").read_text() == "worker 0 is here\n"
    (tmp_path / "script.py").write_text("import torch; torch.distributed.init_process_group('gloo')")
    done = manyhands("launch", "script.py", cwd=tmp_path)
    assert done.code == 1
    assert "hint: under manyhands the session connects the workers" in done.err
    (tmp_path / "script.py").write_text("breakpoint()")
    done = manyhands("launch", "--workers", "1", "script.py", cwd=tmp_path)
    assert done.code == 1
    assert "manyhands launch --debug N script.py" in done.err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    detect._found.cache_clear()
    for name in ("train.py", "cells.ipynb", "job.toml"):
        (tmp_path / name).touch()
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").touch()
    yield tmp_path
    detect._found.cache_clear()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "lauch train.py",
            "unknown command 'lauch'; known: train, launch, plan, probe, export, serve, list, show, convert, doctor, "
            "dash; did you mean launch",
        ),
        ("list strategy", "did you mean strategies? See `manyhands list --help`"),
        ("launch --nproc-per-node 4 train.py", "did you mean --workers? See `manyhands launch --help`"),
        ("launch --nproc_per_node=4 train.py", "did you mean --workers?"),
        ("launch -np 4 train.py", "did you mean --workers?"),
        ("launch --num_processes 4 train.py", "did you mean --workers?"),
        ("launch --gpus 4 train.py", "did you mean --workers?"),
        ("launch --nnodes 2 train.py", "did you mean --hosts?"),
        ("launch --resume train.py", "launch has no --resume, since a script goes on by itself"),
        ("train --workers x", "--workers: 'x' is neither a number"),
        ("train --epochs x", "--epochs 'x': a whole number is expected"),
        ("launch trian.py", "did you mean train.py?"),
        ("launch program", "'program' is a directory; give -m program"),
        ("launch cells.ipynb", "jupyter nbconvert --to script cells.ipynb"),
        ("launch job.toml", "use manyhands train job.toml"),
        ("launch -m", "manyhands launch -m package.module"),
        ("launch -m train.py/x", "manyhands launch -m package.module"),
        ("launch -m train.py", "did you mean -m train, or train.py without -m?"),
        ("launch -m program/__main__.py", "did you mean -m program.__main__, or program/__main__.py without"),
        ("launch -m a-b", "'a-b' is no name of a module"),
        ("launch /dev/stdin", "every worker reads the script by itself"),
        ("launch --debug 2 train.py", "--debug 2: there are workers 0 to 1"),
        ("train train.py --lr 0.1", "use manyhands launch train.py --lr 0.1"),
        ("train --epochs 3 train.py", "train.py is a script; use manyhands launch"),
        ("train.py", "use manyhands launch train.py"),
        ("launch --workers 100000 train.py", "processes fit"),
        ("launch --workers 2:100000 train.py", "--workers 2:100000: this host has"),
        ("launch --workers 2 --servers 100000 train.py", "--workers 2 --servers 100000: this host has"),
        ("launch --threads 100000 train.py", "100000 threads per worker"),
        ("train --workers 100000", "processes fit"),
        ("train --workers 100000 --placement sharded", "processes fit"),
        ("train big.toml", "--workers 100000: this host has"),
    ],
)
def test_what_a_person_may_type_gets_one_sentence(
    words: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "big.toml").write_text("[cluster]\nworkers = 100000\n")
    done = call(capsys, *words.split())
    assert done.code == 2
    assert said in done.refusal()


def test_a_directory_that_is_gone_gets_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = here / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    done = call(capsys, "launch", str(here / "train.py"))
    assert done.code == 2
    assert "is no longer there; give it in another one" in done.refusal()


ODD = """
import sys
import torch
import manyhands as mh
model = torch.nn.Linear(3, 1)
session = mh.session(
    model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
)
session.step(torch.ones(3, 3))
session.close()
print(sys.argv, sys.path[0])
"""


def test_paths_with_spaces_and_other_letters(tmp_path: Path) -> None:
    """A link to a script, as Python has it, begins where the file is; the run's directory is as odd."""
    folder = tmp_path / "größe ü"
    folder.mkdir()
    (folder / "my script.py").write_text(ODD)
    link = tmp_path / "-link"
    link.symlink_to(folder / "my script.py")
    out = Path("runs") / "läuft hier"
    done = manyhands(
        *("launch", "--workers", "1", "--out", str(out), "--", str(link), "a b", "--out", "ü"), cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert f"{[str(link), 'a b', '--out', 'ü']} {folder}" in done.out
    assert (tmp_path / out / "logs" / "worker-0.log").exists() or (tmp_path / out / "events").exists()


GOES_ON = """
import sys, time
import torch
import manyhands as mh
model = torch.nn.Linear(3, 1)
session = mh.session(
    model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
)
if "saved" in sys.argv:
    session.resume(sys.argv[2])
steps = 100_000 if "long" in sys.argv else 8
for number, batch in enumerate(session.batches([torch.ones(3)] * steps, batch_size=1)):
    session.step(batch)
    if "long" in sys.argv:
        time.sleep(0.02)
        if number == 3 and "saves" in sys.argv:
            session.save(wait=True)
    if "fails" in sys.argv and number == 2 and mh.rank() == 1:
        raise ValueError("mine")
"""


def test_a_run_says_where_it_is_and_whose_options_are_whose(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GOES_ON)
    done = manyhands("launch", "script.py", "--workers", "4", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "note: `--workers 4` stands after the script and goes to it;" in done.err
    (run,) = (tmp_path / "runs").iterdir()
    assert done.err.splitlines()[-1] == f"run       runs/{run.name}"
    assert done.out == ""
    done = manyhands(
        "launch", "--out", "run", "--workers", "2", "script.py", "fails", "--out=x", cwd=tmp_path
    )
    assert done.code == 1
    assert "note:" not in done.err, "launch has an --out of its own"
    assert done.err.splitlines()[-3:] == [
        "error: worker 1 of 2 ended with ValueError: mine",
        "the whole output of worker 1: run/logs/worker-1.log",
        "run       run",
    ]


@pytest.mark.parametrize(
    ("number", "words", "code", "said"),
    [
        (signal.SIGINT, [], 130, r"stopped by Ctrl-C in step \d+; no checkpoint; run in run"),
        (
            signal.SIGINT,
            ["saves"],
            130,
            r"stopped by Ctrl-C in step \d+; the newest checkpoint is step-00000004, start the same command again: "
            r'session\.resume\("run/checkpoints"\) in the script goes on; run in run',
        ),
        (
            signal.SIGTERM,
            [],
            75,
            r"told to end by SIGTERM: the run is saved in run; start the same command again: "
            r'session\.resume\("run/checkpoints"\) in the script goes on',
        ),
    ],
)
def test_a_stopped_run_says_how_far_it_came_and_how_to_go_on(
    number: signal.Signals, words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(GOES_ON)
    command = [str(BIN / "manyhands"), "launch", "--out", "run", "script.py", "long", *words]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True
    ) as launcher:
        events = tmp_path / "run" / "events" / "worker-0.jsonl"
        assert wait_until(lambda: events.exists() and events.read_text().count('"kind":"step"') > 5)
        launcher.send_signal(number)
        _, error = launcher.communicate(timeout=60)
    assert launcher.returncode == code, error
    assert re.fullmatch(said, error.splitlines()[-1])
    assert "error:" not in error
    if number == signal.SIGTERM:
        done = manyhands("launch", "script.py", "saved", "run/checkpoints", cwd=tmp_path)
        assert done.code == 0, done.err
        assert len(re.findall(r"going on from run/checkpoints/step-\d{8} \(epoch 1\)", done.err)) == 1


def test_a_run_with_hosts_says_whom_it_waits_for_and_how_to_join(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, shutil, sys\nimport torch\nimport manyhands as mh\nrank = 0\n" + SESSION
    )
    command = [str(BIN / "manyhands"), "launch", "--hosts", "2@127.0.0.1", "--workers", "1"]
    said = tmp_path / "said"
    with (
        said.open("w") as err,
        subprocess.Popen(
            [*command, "--out", "run", "script.py"],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=err,
        ) as first,
    ):
        try:
            assert wait_until(lambda: "manyhands launch --join" in said.read_text())
            found = re.search(r"waiting for 1 more host; .*:\n  (.*)\n", said.read_text())
            assert found
            copy, _, join = found[1].rpartition(" && ")
            assert f"scp 127.0.0.1:{tmp_path / 'run' / 'join.json'} run/" in copy
            words = shlex.split(join)
            assert words == ["manyhands", "launch", "--join", "run", "--workers", "1"]
            done = manyhands(*words[1:], cwd=tmp_path)
            first.wait(60)
        finally:
            for pid in descendants(first.pid):
                if not is_gone(pid):
                    os.kill(pid, signal.SIGKILL)
    assert (done.code, first.returncode) == (0, 0), said.read_text()
    joined = r"joined the run of 127\.0\.0\.1:\d+ with 1 worker; its progress is shown there; Ctrl-C takes this host"
    assert len(re.findall(joined, done.err)) == 1
    assert "all 2 hosts are here" in said.read_text()
