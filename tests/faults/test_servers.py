"""Runs with servers that end badly: the right one is named, nobody hangs, and nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.commands import BIN, clean_environment, last_error, manyhands
from tests.faults import checks, harness
from tests.faults.test_run import LONG_S, Running, leaving_nothing, open_files, wait_until


@contextlib.contextmanager
def serving(folder: Path, strategy: str) -> Iterator[Running]:
    with leaving_nothing(folder, "--strategy", strategy, "--servers", "1") as run:
        sockets = _sockets() & {place for pid in run.processes for place in open_files(pid)}
        assert sockets, "servers and workers of a host talk through a socket, or this test sees nothing"
        yield run
    assert wait_until(lambda: not sockets & _sockets())  # the kernel closes them after the process has ended


def _sockets() -> set[str]:
    """All sockets by which servers talk with their host's workers, of whatever run."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {f"socket:[{line[6]}]" for line in lines if line[-1].startswith("@manyhands/")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path, "parameter-server:async") as run:
        run.launcher.send_signal(number)
        error = run.said()
        assert "Traceback" not in error
        assert run.launcher.returncode == (130 if number == signal.SIGINT else -number)


def test_a_server_that_nobody_may_replace_ends_the_run_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("[cluster]\nreplace = 0\n")
    with leaving_nothing(tmp_path, "spec.toml", "--strategy", "parameter-server", "--servers", "1") as run:
        os.kill(run.workers[2], signal.SIGKILL)
        error = run.said()
        assert run.launcher.returncode == 128 + signal.SIGKILL
        assert last_error(error).startswith(
            "error: server 0 died: killed by SIGKILL; no other takes over from it, since replace = 0; the"
        )
        assert f"the whole output of server 0: {run.out / 'logs' / 'server-0.log'}" not in error, (
            "it said nothing"
        )
        assert "Traceback" not in error
        assert not (run.out / "summary.json").exists()


def test_a_worker_from_outside_joins_a_run_with_servers(tmp_path: Path) -> None:
    """And one of those that were there before dies."""
    settings = json.dumps({"faults": [[1, 9, "kill"]], "until": 3, "down_to": 2, "optimizer": "Adam"})
    asked = ["--strategy", "parameter-server", "--servers", "2", "--workers", "2:3", "--out", "run"]
    command = [str(BIN / "manyhands"), "launch", *asked, str(harness.SCRIPT), str(tmp_path), settings]
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE) as launcher:
        assert wait_until(lambda: (tmp_path / "run" / "join.json").exists() or launcher.poll() is not None)
        joined = manyhands("launch", "--join", "run", cwd=tmp_path)
        assert joined.code == 0, joined.err
        assert launcher.wait(LONG_S) == 0, launcher.communicate()[1]
    ran = harness.Logs(tmp_path, harness.logs_in(tmp_path))
    joiner = max(ran.ends)
    assert set(ran.ends) >= {0, joiner}
    assert joiner > 3, "it has the number of its process"
    assert {"kind": "fault", "step": 9, "fault": "kill"} in ran.logs[1]
    checks.nothing_lost(ran, [], [])
    checks.one_history(ran, "Adam")


SCRIPT = """
import sys
import torch
import manyhands as mh

model = torch.nn.Linear(2, 1)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
for number in range(6):
    session.step(torch.ones(4, 2))
    if number == 3 and sys.argv[1:] == ["fails"] and session.rank == 1:
        raise RuntimeError("the user's own mistake")
print("done", session.rank)
"""


def test_an_optimizer_that_servers_cannot_run_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    asked = ["--strategy", "parameter-server:async", "--servers", "1", "--optimizer", "lbfgs"]
    done = manyhands("train", *asked, cwd=tmp_path)
    assert "servers cannot run L-BFGS" in done.refusal()
    assert not list(tmp_path.iterdir())


def test_a_script_runs_with_servers_and_they_print_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    asked = ["--strategy", "stale:bound=1", "--servers", "2", "--workers", "2"]
    done = manyhands("launch", *asked, "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[worker 0] done 0", "[worker 1] done 1"]


def test_a_mistake_in_a_worker_is_blamed_on_the_worker(tmp_path: Path) -> None:
    """However long it takes to end: here its last handler sleeps, with the interpreter's lock, so no thread runs."""
    sleep = "import atexit, ctypes\natexit.register(ctypes.PyDLL(None).sleep, 2)\n"
    (tmp_path / "script.py").write_text(sleep + SCRIPT)
    asked = ["--strategy", "parameter-server", "--servers", "1", "--workers", "2"]
    done = manyhands("launch", *asked, "script.py", "fails", cwd=tmp_path)
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1
    assert last_error(done.err) == "error: worker 1 of 2 ended with RuntimeError: the user's own mistake"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            ["--strategy", "parameter-server:async"],
            "parameter-server:consistency=async needs --servers 1 or more",
        ),
        (["--servers", "1"], "all-reduce uses no servers"),
        (["--strategy", "parameter-server:async", "--servers", "-1"], "it must be 0 or more"),
        (["--strategy", "parameter-server:eventually", "--servers", "1"], "unknown consistency 'eventually'"),
        (
            ["--strategy", "parameter-server:async,bound=2", "--servers", "1"],
            "bound=2 is for consistency stale",
        ),
        (
            ["--strategy", "parameter-server:every=clasifier=4", "--servers", "1"],
            "unknown layer 'clasifier'; known: ",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_any_process_starts(
    asked: list[str], why: str, tmp_path: Path
) -> None:
    assert why in manyhands("train", *asked, cwd=tmp_path).refusal()
    (tmp_path / "script.py").write_text(SCRIPT)
    assert why in manyhands("launch", *asked, "script.py", cwd=tmp_path).refusal()
