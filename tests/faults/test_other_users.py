"""What another user of the machine can do to a run: nothing, whether it connects, comes first, or never lets go."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from manyhands import telemetry
from manyhands.cluster.coordinator.control import Invitation, Over
from manyhands.cluster.launcher import invitation as invites
from manyhands.cluster.launcher.coordination import Coordination, Elastic
from manyhands.cluster.launchers import addresses
from manyhands.comm.transports import peer_user
from manyhands.comm.transports.arena import Arena
from manyhands.errors import UsageError
from manyhands.launching.run import make_directory
from manyhands.servers.protocol.messages import Hello, encode
from manyhands.servers.transport.host_memory import HostMemory, Sizes
from manyhands.servers.transport.local_socket import LocalConnection, LocalPort, _name
from tests import other_user
from tests.end_to_end.commands import BIN, TIMEOUT_S, clean_environment
from tests.faults.test_control_port import Client, here
from tests.faults.test_run import wait_until
from tests.other_user import NOBODY, acting, descriptors, hears, said

pytestmark = other_user.acts

MANY = 1000

# Connects to a local socket many times, sends garbage, and holds what it gets; at the end it says how many were closed
# without a byte for it.
HOLD = """
kind, name = (getattr(socket, sys.argv[1]), "\\0" + sys.argv[2])
links = []
for _ in range(int(sys.argv[3])):
    link = socket.socket(socket.AF_UNIX, kind)
    link.connect(name)
    try:
        link.send(os.urandom(100))
    except (BrokenPipeError, ConnectionResetError):
        pass
    links.append(link)
print("holds", flush=True)
sys.stdin.readline()
closed = 0
for link in links:
    link.settimeout(10)
    try:
        closed += link.recv(100) == b""
    except ConnectionResetError:  # it was closed with our bytes unread
        closed += 1
print(closed, flush=True)
"""

LISTEN = """
listener = socket.socket(socket.AF_UNIX, getattr(socket, sys.argv[1]))
listener.bind("\\0" + sys.argv[2])
listener.listen(0)
print("listens", flush=True)
sys.stdin.readline()
"""

BIND = """
listener = socket.socket(socket.AF_UNIX)
try:
    listener.bind("\\0" + sys.argv[1])
    print("bound")
except OSError as error:
    print(error.strerror)
"""

FLOOD = """
name = "\\0" + sys.argv[1]
print("begins", flush=True)
while True:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        try:
            link.connect(name)
        except ConnectionRefusedError:
            break
"""


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    arena = Arena(os.memfd_create("test"))
    yield HostMemory(arena, Sizes(length=16, dtype=torch.float32, groups=1, workers=1))
    arena.close()


def name_of(memory: HostMemory) -> str:
    return _name(memory, 0, memory.secret(0))


@contextlib.contextmanager
def listening(port: LocalPort) -> Iterator[list[bytes]]:
    """A server that echoes, in a thread; gives what it has heard."""
    heard: list[bytes] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            for worker, content, _ in port.take():
                heard.append(content)
                port.send(worker, content, None)
            time.sleep(0.0005)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield heard
    finally:
        over.set()
        thread.join()


def greeted(memory: HostMemory) -> LocalConnection:
    worker = LocalConnection(memory, 0)
    worker.send(encode(Hello(number=1, worker=0, digest=0, secret=worker.secret)))
    assert worker.take(wait=True)
    return worker


def test_a_server_closes_a_thousand_connections_of_another_user_unread(memory: HostMemory) -> None:
    before = telemetry.totals().get("strangers", 0)
    port = LocalPort(memory, 0)
    with listening(port) as heard, acting(HOLD, "SOCK_SEQPACKET", name_of(memory), MANY) as other:
        had = descriptors(os.getpid())
        assert hears(other) == "holds"
        worker = greeted(memory)
        worker.send(b"x")
        assert worker.take(wait=True) == (b"x", None)
        assert descriptors(os.getpid()) - had <= 2, "both ends of the worker's connection"
        assert len(heard) == 2
        print("", file=other.stdin, flush=True)
        assert hears(other) == str(MANY)
    worker.close()
    port.close()
    assert telemetry.totals()["strangers"] - before >= MANY


def test_one_who_connects_without_end_does_not_starve_the_workers(memory: HostMemory) -> None:
    port = LocalPort(memory, 0)
    with listening(port), acting(FLOOD, name_of(memory)) as one, acting(FLOOD, name_of(memory)) as other:
        assert hears(one) == hears(other) == "begins"
        began_s = time.monotonic()
        worker = greeted(memory)
        for _ in range(100):
            worker.send(b"x")
            assert worker.take(wait=True) == (b"x", None)
        assert time.monotonic() - began_s < 20
        port.forget(0)
        worker.close()
    port.close()


def test_no_user_can_know_the_name_of_a_server_before_it_listens(memory: HostMemory) -> None:
    names = []
    for _ in range(3):
        LocalPort(memory, 0).close()
        names.append(name_of(memory))
    assert len(set(names)) == 3
    assert not any(memory.secret(0).hex() in name for name in names)


def test_another_user_in_place_of_a_server_that_died_keeps_no_worker(memory: HostMemory) -> None:
    """It sees the old name in /proc/net/unix, and takes it before the workers know the new one."""
    LocalPort(memory, 0).close()
    found: list[LocalConnection] = []
    with acting(LISTEN, "SOCK_SEQPACKET", name_of(memory)) as other:
        assert hears(other) == "listens"
        worker = threading.Thread(target=lambda: found.append(greeted(memory)))
        worker.start()
        time.sleep(0.5)
        assert not found
        port = LocalPort(memory, 0)
        with listening(port):
            worker.join(20)
            port.forget(0)
    found[0].close()
    port.close()


# The coordinator


def coordinate(address: str = "") -> Coordination:
    hosts = int(bool(address))
    return Coordination([0, 1], Elastic(most=2, replace=0, stall_s=60.0, hosts=hosts, address=address))


def answers(coordination: Coordination) -> None:
    """A member that says that it was in an old generation is told that it is over."""
    client = Client(coordination)
    client.socket.send(here(-1, member=next(members)))
    answer = client.answer()
    client.close()
    assert answer == Over(generation=-1, gone=())


members = itertools.count(9)  # it answers each but once


def killed(coordination: Coordination) -> None:
    os.kill(coordination.pid, 9)
    while coordination.take() is not None:
        time.sleep(0.01)


def test_the_coordinator_closes_a_thousand_connections_of_another_user_unread() -> None:
    with coordinate() as coordination:
        answers(coordination)
        had = descriptors(coordination.pid)
        name = coordination.invitation.endpoint.removeprefix("ipc://@")
        with acting(HOLD, "SOCK_STREAM", name, MANY) as other:
            assert hears(other) == "holds"
            answers(coordination)
            assert descriptors(coordination.pid) - had < 20
            print("", file=other.stdin, flush=True)
            assert hears(other) == str(MANY)
        answers(coordination)


def test_the_place_of_a_coordinator_that_died_stays_the_run_s() -> None:
    with coordinate() as coordination:
        name = coordination.invitation.endpoint.removeprefix("ipc://@")
        answers(coordination)
        killed(coordination)
        assert said(BIND, name) == "Address already in use"
        with acting(
            HOLD, "SOCK_STREAM", name, 200
        ) as other:  # they wait for the next coordinator, which closes them
            assert hears(other) == "holds"
            coordination.start_again()
            answers(coordination)
            print("", file=other.stdin, flush=True)
            assert hears(other) == "200"


TAKE_PORT = """
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen()
    print("listens")
except OSError as error:
    print(error.strerror)
"""

HOLD_PORT = """
links = [socket.socket() for _ in range(int(sys.argv[2]))]
for link in links:
    link.connect(("127.0.0.1", int(sys.argv[1])))
for link in links[::2]:
    link.send(os.urandom(100))
print("holds", flush=True)
sys.stdin.readline()
"""


def test_the_port_of_a_coordinator_is_neither_taken_nor_starved() -> None:
    address = addresses.meeting_address("127.0.0.1")
    port = address.rpartition(":")[2]
    assert said(TAKE_PORT, port) == "Address already in use", "before the coordinator has begun"
    with coordinate(address) as coordination:
        with acting(HOLD_PORT, port, MANY) as other:
            assert hears(other) == "holds"
            answers(coordination)
            assert descriptors(coordination.pid) < MANY + 100
            # What has not proved who it is after some seconds is closed.
            assert wait_until(lambda: descriptors(coordination.pid) < 100)
        killed(coordination)
        assert said(TAKE_PORT, port) == "Address already in use"
        coordination.start_again()
        answers(coordination)


# Memory and files

HAS_MEMORY = """
fd = os.memfd_create("theirs")
os.write(fd, bytes(16))
print(os.getpid(), fd, flush=True)
sys.stdin.readline()
"""


def test_memory_of_another_user_is_not_opened() -> None:
    """Root could: a process id may by now be that of another process."""
    with acting(HAS_MEMORY) as other:
        pid, fd = hears(other).split()
        with pytest.raises(PermissionError, match="another user's"):
            peer_user.opened(Path(f"/proc/{pid}/fd/{fd}"), os.O_RDWR)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory into which all users can look, as one under /home may be."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def invite() -> invites.Invite:
    return invites.Invite(
        invitation=Invitation(
            endpoint="ipc://@x", server_key="a" * 40, public_key="b" * 40, secret_key="c" * 40
        ),
        command=["train.py"],
        strategy=None,
        workers=2,
        servers=0,
        most=3,
        launcher=1,
        memory_fd=3,
        mark="",
    )


def test_only_an_invitation_that_no_other_user_could_write_or_read_is_taken(place: Path) -> None:
    with invites.published(place, invite()):
        path = place / invites.FILE
        assert invites.read(str(place)) == invite()
        path.chmod(0o640)
        with pytest.raises(UsageError, match="other users can open it"):
            invites.read(str(place))
        path.chmod(0o600)
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(UsageError, match="belongs to another user"):
            invites.read(str(place))


def test_a_run_directory_is_for_its_owner_alone(place: Path) -> None:
    run = make_directory(place / "runs" / "mine")
    assert run.stat().st_mode & 0o777 == 0o700
    assert said(TRY_TO_READ, run) == "PermissionError"


TRY_TO_READ = """
try:
    print(os.listdir(sys.argv[1]))
except OSError as error:
    print(type(error).__name__)
"""

MAKE_DIRECTORY = """
os.umask(0)
for place in sys.argv[1:]:
    try:
        make_directory(pathlib.Path(place))
        print("made")
    except UsageError as error:
        print("another user" in str(error))
"""


def test_a_run_directory_of_another_user_is_refused(place: Path) -> None:
    for name, owner in (("theirs", NOBODY - 1), ("own", NOBODY)):
        (place / name).mkdir()
        os.chown(place / name, owner, owner)
    imports = "from manyhands.launching.run import make_directory; from manyhands.errors import UsageError"
    assert said(MAKE_DIRECTORY, place / "theirs", place / "own" / "run", imports=imports) == "True\nmade"
    assert (place / "own" / "run").stat().st_mode & 0o777 == 0o700


# A whole run

SCRIPT = """
import time
import torch
import manyhands as mh

model = torch.nn.Linear(2, 1)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, batch: model(batch).mean())
for number in range(300):
    session.step(torch.ones(4, 2))
    time.sleep(0.02)
"""

# Everything that a user without rights can find out and do; ends when it is told to.
ATTACK = """
run = pathlib.Path(sys.argv[1])
refused = []
for path in (run, run / "join.json", run / "events", run / "summary.json"):
    try:
        os.listdir(path) if path in (run, run / "events") else path.read_bytes()
    except PermissionError:
        refused.append(path.name)
names = set()
for line in open("/proc/net/unix"):
    if "@manyhands" in line:
        names.add((line.split()[4], line.split()[7]))
links = []
for kind, name in names:
    for _ in range(int(sys.argv[2])):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if kind == "0001" else socket.SOCK_SEQPACKET)
        link.settimeout(1)
        try:
            link.connect("\\0" + name[1:])
            link.send(os.urandom(64))
        except OSError:
            pass
        links.append(link)
texts = []
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    for kind in ("cmdline", "environ"):
        try:
            texts.append((entry / kind).read_text(errors="replace"))
        except OSError:
            pass
print(len(refused), len(names), flush=True)
print(repr("".join(texts)), flush=True)
sys.stdin.readline()
"""


def launched(place: Path, name: str) -> "subprocess.Popen[str]":
    (place / "script.py").write_text(SCRIPT)
    asked = f"--workers 2:3 --strategy parameter-server --servers 1 --out {name} script.py".split()
    command = [str(BIN / "manyhands"), "launch", *asked]
    return subprocess.Popen(
        command,
        cwd=place,
        env=clean_environment(),
        text=True,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )


def wall_s(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text())["wall_s"])


def ended(launcher: "subprocess.Popen[str]") -> None:
    _, errors = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, errors


def began(run: Path, launcher: "subprocess.Popen[str]") -> None:
    def steps() -> bool:
        assert launcher.poll() is None
        return any(b'"step"' in path.read_bytes() for path in run.glob("events/worker-*.jsonl"))

    assert wait_until(steps)


def test_a_run_goes_on_whatever_another_user_tries(place: Path) -> None:
    with launched(place, "quiet") as launcher:
        ended(launcher)
    with launched(place, "run") as launcher:
        try:
            began(place / "run", launcher)
            key = msgspec.json.decode(
                (place / "run" / "join.json").read_bytes(), type=invites.Invite
            ).invitation
            with acting(ATTACK, place / "run", MANY) as other:
                refused, names = map(int, hears(other).split())
                texts = hears(other)
                ended(launcher)
        finally:
            launcher.kill()
    assert refused == 4
    assert names >= 2, "the coordinator and the server"
    assert "manyhands" in texts, "command lines can be read"
    assert key.secret_key not in texts
    assert key.server_key not in texts
    assert wall_s(place / "run") < 2 * wall_s(place / "quiet") + 10
