"""A host that has joined waits for the others and obeys a signal meanwhile, and nothing is left on it after the run."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from manyhands.cluster.coordinator.remote_hosts import SILENCE_S
from manyhands.lab import emulated_hosts
from manyhands.lab.emulated_hosts import EmulatedHosts
from tests.end_to_end.commands import BIN, clean_environment
from tests.faults.test_run import is_gone, wait_until

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

WAIT_S = 6.0  # for the first host, instead of ten minutes
STALL_S = 3.0  # instead of 10 seconds
AT_ONCE_S = 5.0  # on a busy machine; a run that was told to end and cannot is given up after more than 9 s
FIRST = r"10\.77\.0\.1:\d+"
WAITS = f"waiting for the first host, {FIRST}, of which nothing was heard for . s; this host waits for it . s more"

SCRIPT = """
import sys, time
from pathlib import Path
import torch
import manyhands as mh

folder = Path(sys.argv[1])
model = torch.nn.Linear(2, 1)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
while session.mean(float((folder / "finish").exists())) == 0:
    for batch in session.batches([torch.ones(2)] * 64, batch_size=4):
        time.sleep(0.02)
        if mh.rank() == 0 and (folder / "slow").exists():
            (folder / "slow").unlink()
            time.sleep(float(sys.argv[2]))
        session.step(batch)
    (folder / f"epoch-{mh.rank()}").touch()
    if mh.rank() == 0 and (folder / "fail").exists():
        raise RuntimeError("the user's own mistake")
"""


class Cluster:
    """Launchers on emulated hosts: the first one, and others that join its run."""

    def __init__(self, folder: Path, net: EmulatedHosts, stack: ExitStack) -> None:
        self.net = net
        self.folder = folder
        self.out = folder / "run"
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._stack = stack
        (folder / "script.py").write_text(SCRIPT)

    def begin(self, hosts: int, *words: str) -> None:
        """With a worker and a server on the first host."""
        asked = f"--hosts {hosts}@{self.net.address(0)} --workers 1 --servers 1 --threads 1".split()
        strategy = ["--strategy", "parameter-server:sync,copies=1"]
        script = [str(self.folder / "script.py"), str(self.folder), str(STALL_S + 1.5)]
        self._launch(0, *asked, *strategy, "--out", str(self.out), *words, *script)
        assert wait_until((self.out / "join.json").exists), self.said(0)

    def join(self, host: int) -> None:
        """The same on the next one, which has a directory of its own."""
        own = self.folder / f"host-{host}"
        own.mkdir(0o700)
        shutil.copy(self.out / "join.json", own)
        self._launch(host, "--join", str(own), "--workers", "1", "--servers", "1")

    def _launch(self, host: int, *words: str) -> None:
        assert host == len(self.launchers)
        said = self._stack.enter_context((self.folder / f"said-{host}").open("wb"))
        command = [*self.net.command_prefix(host), str(BIN / "manyhands"), "launch", *words]
        limits = {"MANYHANDS_WAIT_S": str(WAIT_S), "MANYHANDS_STALL_S": str(STALL_S)}
        environ = clean_environment(MANYHANDS_CORES="", **limits)
        self.launchers.append(
            subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        )

    def said(self, host: int) -> str:
        return (self.folder / f"said-{host}").read_text()

    def says(self, host: int, pattern: str) -> None:
        """Wait until it does."""
        assert wait_until(lambda: bool(re.search(pattern, self.said(host)))), self.said(host)

    def trains(self) -> None:
        """Until every host has a worker that has made an epoch."""
        count = len(self.launchers)
        assert wait_until(lambda: len([*self.folder.glob("epoch-*")]) == count), [
            *map(self.said, range(count))
        ]

    def ends(self, host: int, within_s: float, code: int, pattern: str) -> None:
        """Its launcher ends in time, with that code and these last words, and no process of it is left."""
        pids = self.net.processes(host)
        try:
            assert self.launchers[host].wait(within_s) == code, self.said(host)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"host {host} goes on: {self.said(host)}") from None
        assert re.search(pattern, self.said(host).splitlines()[-1]), self.said(host)
        assert host == 0 or "Traceback" not in self.said(host)
        assert wait_until(lambda: all(map(is_gone, pids))), "a process is left"
        assert not [pid for pid in self.net.processes(host) if not is_gone(pid)]

    def signal(self, host: int, number: int) -> None:
        self.launchers[host].send_signal(number)

    def kill_host(self, host: int) -> None:
        for pid in self.net.processes(host):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for host in range(self.net.count):
            self.kill_host(host)
        for launcher in self.launchers:
            launcher.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as stack:

        def made(hosts: int, name: str = "cluster") -> Cluster:
            net = stack.enter_context(EmulatedHosts(hosts))
            (tmp_path / name).mkdir()
            found = Cluster(tmp_path / name, net, stack)
            stack.callback(found.close)
            return found

        yield made


def test_hosts_that_wait_for_another_one_obey_a_signal(cluster: Callable[..., Cluster]) -> None:
    """One that leaves is missing again; each says what it waits for."""
    run = cluster(2)
    run.begin(3)
    run.says(0, "waiting for 2 more hosts; there, ")
    run.join(1)
    run.says(0, r"waiting for 1 more host \(10\.77\.0\.2 has come\); there, ")
    run.says(
        1, f"waiting for 1 more host before the run of {FIRST} begins; this host waits as long as the first"
    )
    run.signal(1, signal.SIGTERM)
    run.ends(1, AT_ONCE_S, 143, "^stopped by SIGTERM while this host waited for 1 more host$")
    assert wait_until(lambda: run.said(0).count("waiting for 2 more hosts") == 2), "it is missing again"
    run.signal(0, signal.SIGTERM)
    run.ends(
        0,
        AT_ONCE_S,
        143,
        "^stopped by SIGTERM before the first step, while it waited for 2 more hosts; no ch",
    )


def test_hosts_whose_first_host_is_gone_obey_a_signal_or_give_up(cluster: Callable[..., Cluster]) -> None:
    """Two runs side by side: of one the first host is killed with all that is on it, of the other its launcher."""
    killed, orphaned = (cluster(3, name) for name in ("killed", "orphaned"))
    for run in (killed, orphaned):
        run.begin(3)
        run.join(1)
        run.join(2)
    killed.trains()
    orphaned.trains()
    first = orphaned.net.processes(0)
    killed.kill_host(0)
    orphaned.signal(0, signal.SIGKILL)
    assert wait_until(lambda: all(map(is_gone, first))), "the kernel and the guard end the rest"
    for run in (killed, orphaned):
        run.says(1, WAITS)
        run.signal(1, signal.SIGTERM)
        run.ends(
            1, AT_ONCE_S, 143, f"^stopped by SIGTERM while this host waited for the first host, {FIRST}$"
        )
    for run in (killed, orphaned):
        run.says(2, WAITS)
        run.ends(
            2, WAIT_S, 69, f"^error: nothing was heard of the first host, {FIRST}, for 6 s, and this host has"
        )


def test_when_a_run_has_ended_well_every_host_ends(cluster: Callable[..., Cluster]) -> None:
    """Also one whose worker has left, and that has nothing but its server in the run; one that is cut off obeys."""
    run = cluster(3)
    run.begin(3)
    run.join(1)
    run.join(2)
    run.trains()
    run.net.cut(2)
    run.says(2, WAITS)
    run.signal(2, signal.SIGTERM)
    run.ends(2, AT_ONCE_S, 143, f"^stopped by SIGTERM while this host waited for the first host, {FIRST}$")
    run.says(0, r"host 10\.77\.0\.3 is gone")
    (
        run.folder / "slow"
    ).touch()  # the first host's worker takes longer than a stall to come to where another can leave
    assert wait_until(lambda: not (run.folder / "slow").exists())
    run.signal(1, signal.SIGTERM)
    run.says(0, r"worker \d+ has left")
    time.sleep(max(SILENCE_S, STALL_S) + 1.5)
    assert run.launchers[1].poll() is None, f"servers stay until the run is over: {run.said(1)}"
    (run.folder / "finish").touch()
    run.ends(0, 20.0, 0, "^run       ")
    run.ends(1, AT_ONCE_S, 0, "")


def test_when_a_run_has_ended_by_an_error_every_host_ends(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.begin(2)
    run.join(1)
    run.trains()
    (run.folder / "fail").touch()
    run.ends(0, 20.0, 1, "^run       ")
    run.ends(
        1,
        AT_ONCE_S,
        1,
        f"^error: the run of {FIRST} has ended: worker 0 of 1 ended with RuntimeError: the user's own mistake$",
    )
