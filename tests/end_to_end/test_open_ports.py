"""`manyhands doctor RUN` prints the ports at which a run listens: those that its sockets have, and no others."""

import ast
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from manyhands.lab import emulated_hosts
from tests.end_to_end.commands import BIN, TIMEOUT_S, clean_environment, manyhands, run
from tests.end_to_end.test_launchers import free_port

SCRIPT = """
import pathlib
import time
import torch
import manyhands as mh

model = torch.nn.Linear(2, 1)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, batch: model(batch).mean())
while session.mean(float(pathlib.Path("enough").exists())) < 1:
    session.step(torch.ones(4, 2))
    time.sleep(0.02)
session.close()
"""

KEYS, CLOSED, NOTHING = "keys of the run", "closed since all have met", "nothing"
Found = set[tuple[int, str]]  # port and address
Start = Callable[..., None]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command in a directory with the script, and sees all to a good end."""
    (tmp_path / "script.py").write_text(SCRIPT)
    started: list[subprocess.Popen[bytes]] = []

    def begin(command: Sequence[str], **environ: str) -> None:
        with (tmp_path / f"said-{len(started)}").open("wb") as said:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            one = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(**environ), **pipes)  # type: ignore[call-overload]
        started.append(one)

    begin.started = started  # type: ignore[attr-defined]
    yield begin
    end(tmp_path, started)


def end(folder: Path, started: Sequence["subprocess.Popen[bytes]"]) -> None:
    (folder / "enough").touch()
    try:
        assert [one.wait(TIMEOUT_S) for one in started] == [0] * len(started)
    finally:
        for one in started:
            one.kill()
            one.wait()


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += tree(child)
    return found


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def train(start: Start, folder: Path, workers: Sequence[int]) -> None:
    """Wait until these workers have made steps, and what they have opened is in their records."""
    paths = [folder / "run" / "events" / f"worker-{worker}.jsonl" for worker in workers]

    def have_stepped() -> bool:
        for number, one in enumerate(start.started):  # type: ignore[attr-defined]
            assert one.poll() is None, (folder / f"said-{number}").read_text()
        return all(path.exists() and b'"step"' in path.read_bytes() for path in paths)

    assert wait_until(have_stepped)
    time.sleep(0.5)


def listening(pids: Sequence[int]) -> Found:
    """Each socket of each of them is taken over from the kernel and asked itself."""
    system = ctypes.CDLL(None, use_errno=True)
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            holder = os.pidfd_open(pid)
            for name in os.listdir(f"/proc/{pid}/fd"):
                copy = system.syscall(438, holder, int(name), 0)  # pidfd_getfd
                if copy >= 0:
                    found |= set(_asked(copy))
            os.close(holder)
    return found


def _asked(fd: int) -> Iterator[tuple[int, str]]:
    try:
        one = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return
    with one:
        is_network = one.family in (socket.AF_INET, socket.AF_INET6)
        if is_network and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield one.getsockname()[1], one.getsockname()[0]


CONNECT = """
import ast, select, socket, sys
links = {}
for address, port in ast.literal_eval(sys.argv[1]):
    links[address, port] = link = socket.socket()
    link.setblocking(False)
    link.connect_ex((address, port))
sys.stdin.read()
answers = select.select([], links.values(), [], 0)[1]
print([(port, address) for (address, port), link in links.items() if link in answers])
"""


def answering(places: Iterable[tuple[int, str]], prefix: Sequence[str] = ()) -> Found:
    """Those of the places that take a connection, all tried at once for half a second."""
    asked = repr([(address, port) for port, address in places])
    with subprocess.Popen([*prefix, sys.executable, "-c", CONNECT, asked], **PIPES) as process:  # type: ignore[call-overload]
        time.sleep(0.5)
        said, _ = process.communicate()
    return set(ast.literal_eval(said))


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def printed(folder: Path, prefix: Sequence[str] = ()) -> tuple[dict[tuple[int, str], tuple[str, str]], str]:
    """The table: who listens at each port and address, and the protection; and all that was said."""
    done = run([*prefix, str(BIN / "manyhands"), "doctor", "run"], folder)
    assert done.code == 0, done.err
    rows = [re.split("  +", line) for line in done.out.splitlines() if re.match(r"\d+ +[0-9a-f.:]+ ", line)]
    return {(int(port), address): (who, kind) for port, address, who, kind in rows}, done.out


def test_a_run_of_our_launcher_on_one_host_opens_no_port(start: Start, tmp_path: Path) -> None:
    asked = "--workers 2 --servers 1 --strategy parameter-server --out run script.py"
    start([str(BIN / "manyhands"), "launch", *asked.split()])
    train(start, tmp_path, range(2))
    table, said = printed(tmp_path)
    assert not table
    assert "none of them listens at a TCP port" in said
    pids = tree(start.started[0].pid)  # type: ignore[attr-defined]
    assert not listening(pids)
    named = dict(
        re.findall(
            r"([a-z ]+\d*) \((\d+)\)",
            next(line for line in said.splitlines() if line.startswith("processes of")),
        )
    )
    names = {name.strip(): int(pid) for name, pid in named.items()}
    assert {"launcher", "coordinator", "worker 0", "worker 1", "server 0"} <= names.keys()
    assert set(names.values()) == set(pids)


@pytest.mark.skipif(emulated_hosts.available() is not None, reason=str(emulated_hosts.available()))
def test_on_several_hosts_each_names_its_own_ports(start: Start, tmp_path: Path) -> None:
    with emulated_hosts.EmulatedHosts(2) as net:
        words = "--workers 1 --servers 1"
        asked = f"{words} --hosts 2@{net.address(0)} --strategy parameter-server:sync,copies=1 --out run script.py"
        start([*net.command_prefix(0), str(BIN / "manyhands"), "launch", *asked.split()])
        assert wait_until((tmp_path / "run" / "join.json").exists)
        joins = f"launch --join run {words}"
        start([*net.command_prefix(1), str(BIN / "manyhands"), *joins.split()])
        train(start, tmp_path, (0, 1000))
        opens_with_keys_alone(net, tmp_path, 0, "server 1", "worker 0")
        said = opens_with_keys_alone(net, tmp_path, 1, "server 1001", "worker 1000")
        os.kill(int(said.partition("worker 1000 (")[2].partition(")")[0]), signal.SIGKILL)
        train(start, tmp_path, (1002,))
        opens_with_keys_alone(net, tmp_path, 1, "server 1001", "worker 1002")
        for number in range(2):
            first = (tmp_path / f"said-{number}").read_text().splitlines()[0]
            assert first.startswith("while hosts meet, PyTorch's store (")
        assert f"(a free port of {net.address(0)})" in (tmp_path / "said-0").read_text()
        end(tmp_path, start.started)  # type: ignore[attr-defined]


def opens_with_keys_alone(
    net: emulated_hosts.EmulatedHosts, folder: Path, host: int, server: str, worker: str
) -> str:
    """What doctor prints is what is there, and what can be connected to from the other host."""
    table, said = printed(folder, net.command_prefix(host))
    assert set(table) == listening(net.processes(host))
    assert {address for _, address in table} == {net.address(host)}
    kinds: dict[str, set[str]] = {}
    for who, protection in table.values():
        kinds.setdefault(who, set()).add(protection)
    meeting = {"launcher, coordinator": {KEYS}} if host == 0 else {}
    assert kinds == {server: {KEYS}, worker: {CLOSED}, **meeting}, "worker: PyTorch's store and Gloo"
    assert "no protection" not in said
    keyed = {place for place, (_, protection) in table.items() if protection == KEYS}
    assert answering(table, net.command_prefix(1 - host)) == keyed
    return said


OURS = [str(BIN / "manyhands"), "launch", "--out", "run", "script.py"]


def torchrun(start: Start) -> tuple[str, str]:
    agent = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--no-python"]
    start([*agent, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *OURS])
    return "torchrun", NOTHING


def mpiexec(start: Start) -> tuple[str, str]:
    start([str(BIN / "mpiexec"), "-n", "2", *OURS])
    return "worker 0", CLOSED


def slurm(start: Start) -> tuple[str, str]:
    same = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for rank in range(2):
        start(OURS, **same, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    return "worker 0", CLOSED


@pytest.mark.parametrize("launcher", [torchrun, mpiexec, slurm])
def test_what_another_launcher_opens_is_named(
    launcher: Callable[[Start], tuple[str, str]], start: Start, tmp_path: Path
) -> None:
    meets, protection = launcher(start)
    train(start, tmp_path, range(2))
    table, said = printed(tmp_path)
    pids = [pid for one in start.started for pid in tree(one.pid)]  # type: ignore[attr-defined]
    assert set(table) == listening(pids) != set()
    ports = [port for (port, _), (who, kind) in table.items() if (who, kind) == (meets, protection)]
    assert ports, said
    reached = answering((port, "127.0.0.1") for port in ports)
    assert reached == ({(port, "127.0.0.1") for port in ports} if protection == NOTHING else set())
    assert KEYS not in {kind for _, kind in table.values()}
    is_open = NOTHING in {kind for _, kind in table.values()}
    assert ("no protection" in said.splitlines()[-1]) == is_open


def test_a_run_that_is_over_or_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "run" / "events" / "worker-0.jsonl").write_text("")
    with (tmp_path / "run" / "events" / "worker-0.jsonl").open():  # a reader is no worker
        done = manyhands("doctor", "run", cwd=tmp_path)
    assert "no process on this host writes into run" in done.refusal()
