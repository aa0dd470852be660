"""Strangers on the network, who have no key, attack every port with keys of a run on two hosts: nothing comes of it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from manyhands.lab import emulated_hosts
from tests.end_to_end.commands import BIN, TIMEOUT_S, assert_close, clean_environment, manyhands

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KINDS = ("scan", "slow", "hold", "half-open", "garbage", "lengths", "replay")
STEPS = 400
ATTACK_S = 5.0
STRANGER = 2  # the third host
GROWTH_BYTES = 64 << 20
"""Of a process with a thousand connections and more at once, which ZeroMQ gives some kilobytes each."""


def python(net: emulated_hosts.EmulatedHosts, host: int, *words: str) -> "subprocess.Popen[str]":
    command = [*net.command_prefix(host), sys.executable, str(BENCHMARKS / "attack_worker.py"), *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def ending(net: emulated_hosts.EmulatedHosts) -> Iterator[list["subprocess.Popen[bytes]"]]:
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        yield launchers
    finally:
        for host in range(net.count):
            for pid in net.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for one in launchers:
            one.wait()


def have_stepped(run: Path, workers: Sequence[int]) -> bool:
    paths = [run / "events" / f"worker-{worker}.jsonl" for worker in workers]
    return all(path.exists() and b'"step"' in path.read_bytes() for path in paths)


def keyed(net: emulated_hosts.EmulatedHosts, host: int, run: Path) -> list[str]:
    command = [*net.command_prefix(host), str(BIN / "manyhands"), "doctor", str(run)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [f"{ip}:{port}" for port, ip in re.findall(r"^(\d+) +(\S+) .*  keys of the run$", said, re.M)]


def resident(pids: Sequence[int]) -> dict[int, int]:
    """Bytes in memory, by process."""
    return {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids}


def test_a_run_on_two_hosts_ends_as_if_no_stranger_were_there(tmp_path: Path) -> None:
    run, recorded, script = tmp_path / "run", tmp_path / "recorded", str(BENCHMARKS / "attacked_worker.py")
    with emulated_hosts.EmulatedHosts(3) as net, ending(net) as launchers:

        def launch(host: int, *words: str) -> None:
            command = [*net.command_prefix(host), str(BIN / "manyhands"), "launch", *words]
            with (tmp_path / f"said-{host}").open("wb") as said:
                launchers.append(
                    subprocess.Popen(
                        command, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said
                    )
                )

        both = ["--workers", "1", "--servers", "1"]
        first = ["--hosts", f"2@{net.address(0)}", "--strategy", "parameter-server:sync,copies=1"]
        launch(0, *both, *first, "--out", str(run), script, str(tmp_path), str(STEPS))
        wait_until((run / "join.json").exists)
        with python(net, 1, "record", net.interface(1), str(recorded)) as recorder:
            launch(1, *both, "--join", str(run))
            wait_until(lambda: have_stepped(run, (0, 1000)))
            recorder.communicate()
        targets = [target for host in range(2) for target in keyed(net, host, run)]
        assert len(targets) == 3, "the coordinator and two servers"
        pids = [pid for host in range(2) for pid in net.processes(host)]
        before = resident(pids)
        kinds = ",".join(f"replay={recorded}" if kind == "replay" else kind for kind in KINDS)
        with python(net, STRANGER, "attack", str(ATTACK_S), kinds, *targets) as attacker:
            said, _ = attacker.communicate(timeout=TIMEOUT_S)
        after = resident(pids)  # of the same processes: none has ended
        assert launchers[0].poll() is None, "the attack came before the end"
        codes = [one.wait(TIMEOUT_S) for one in launchers]
    assert codes == [0, 0], (tmp_path / "said-0").read_text()
    done = json.loads(said)
    for kind in KINDS:
        assert done[kind] > 50, f"{kind} has attacked"
    assert done["half-open"] >= 1000
    assert done["hold"] >= 500
    assert done["replay: closed by the other side"] + done["garbage: closed by the other side"] > 0
    assert max(after[pid] - before[pid] for pid in pids) < GROWTH_BYTES
    events = (run / "events" / "launcher.jsonl").read_text()
    assert not re.findall('"kind":"(death|host|coordinator|server)"', events)
    alone = manyhands("launch", "--workers", "2", script, str(tmp_path / "run"), str(STEPS), cwd=tmp_path)
    assert alone.code == 0, alone.err
    ours, theirs = (torch.load(place / "trained.pt", weights_only=True) for place in (tmp_path, run))
    assert_close(ours, theirs)
