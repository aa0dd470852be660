"""The checker of tests/hygiene.py notices each kind of thing that a test can leave behind, and nothing else."""

import contextlib
import mmap
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hygiene

CHILD = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]


@contextlib.contextmanager
def a_thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    yield
    end.set()
    thread.join()


@contextlib.contextmanager
def a_variable() -> Iterator[None]:
    os.environ["FORGOTTEN"] = "secret"
    yield
    del os.environ["FORGOTTEN"]


@contextlib.contextmanager
def a_changed_variable() -> Iterator[None]:
    before = os.environ["PATH"]
    os.environ["PATH"] = "/forgotten"
    yield
    os.environ["PATH"] = before


@contextlib.contextmanager
def a_removed_variable() -> Iterator[None]:
    before = os.environ.pop("PATH")
    yield
    os.environ["PATH"] = before


@contextlib.contextmanager
def a_file() -> Iterator[None]:
    with open(__file__):
        yield


@contextlib.contextmanager
def anonymous_memory() -> Iterator[None]:
    fd = os.memfd_create("forgotten")
    yield
    os.close(fd)


@contextlib.contextmanager
def another_pipe() -> Iterator[None]:
    fds = os.pipe()
    yield
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def a_listening_socket() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)):
        yield


@contextlib.contextmanager
def a_socket_of_the_host() -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"\0forgotten-{os.getpid()}")
        yield


@contextlib.contextmanager
def an_unbound_socket() -> Iterator[None]:
    with socket.socket():
        yield


@contextlib.contextmanager
def a_temporary_file() -> Iterator[None]:
    fd, name = tempfile.mkstemp()
    os.close(fd)
    yield
    os.unlink(name)


@contextlib.contextmanager
def a_temporary_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory():
        yield


@contextlib.contextmanager
def a_segment() -> Iterator[None]:
    path = Path(f"/dev/shm/forgotten-{os.getpid()}")
    path.touch()
    yield
    path.unlink()


LEAKS = [
    (a_thread, r"thread \d+: \S+ \(forgotten\)"),
    (a_variable, "environment variable FORGOTTEN"),
    (a_changed_variable, "environment variable PATH"),
    (a_removed_variable, "environment variable PATH"),
    (a_file, r"descriptor .*test_hygiene\.py"),
    (anonymous_memory, r"descriptor /memfd:forgotten \(deleted\)"),
    (another_pipe, r"descriptor pipe:\[\d+\]"),
    (a_listening_socket, r"socket of tcp, port \d+, listening"),
    (a_socket_of_the_host, r"socket of the host, @forgotten-\d+"),
    (an_unbound_socket, r"socket without an address \(inode \d+\)"),
    (a_temporary_file, r"temporary file \S+"),
    (a_temporary_folder, r"temporary file \S+"),
    (a_segment, r"segment /dev/shm/forgotten-\d+"),
]


@pytest.mark.parametrize(("leak", "sentence"), LEAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_it_notices(leak: contextlib.AbstractContextManager[None], sentence: str) -> None:
    before = hygiene.look()
    with leak():  # type: ignore[operator]
        left = hygiene.leftovers(before, own_patience_s=0, shared_patience_s=0)
        assert left
        assert all(re.fullmatch(sentence, one) for one in left), left
    assert hygiene.leftovers(before) == []


@pytest.mark.processes
def test_it_notices_a_process_alive_or_unburied() -> None:
    before = hygiene.look()
    with subprocess.Popen(CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdout.readline()  # before, it may not have its command yet
        child.stdout.close()
        alive = hygiene.leftovers(before, own_patience_s=0)
        assert any(one.startswith(f"process {child.pid}: {sys.executable} -S") for one in alive), alive
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert hygiene.leftovers(before, own_patience_s=0) == [f"process {child.pid}: a zombie"]
    assert hygiene.leftovers(before) == []


def test_one_more_of_what_was_there_counts() -> None:
    with a_file():
        before = hygiene.look()
        with a_file():
            assert len(hygiene.leftovers(before, own_patience_s=0)) == 1
    assert hygiene.leftovers(before) == []  # less than before is no leak


def test_what_waits_for_the_garbage_collector_is_no_leak() -> None:
    fd = os.memfd_create("garbage")
    os.ftruncate(fd, 4096)
    before = hygiene.look()
    ring: list[object] = [mmap.mmap(fd, 4096)]  # has a descriptor of its own until it is freed
    ring.append(ring)
    del ring
    assert hygiene.look().own["descriptor"] - before.own["descriptor"]
    assert hygiene.leftovers(before, own_patience_s=0) == []
    os.close(fd)


def test_a_thread_that_is_about_to_end_is_waited_for() -> None:
    before = hygiene.look()
    waited_for = threading.Event()

    def linger() -> None:
        waited_for.wait()
        # Until the checker, in the main thread, has looked at least once and sleeps.
        main = threading.main_thread().ident
        while sys._current_frames()[main].f_code.co_name != "leftovers":  # type: ignore[index]
            pass

    threading.Thread(target=linger).start()
    waited_for.set()
    assert hygiene.leftovers(before) == []


def test_it_does_not_wait_where_nothing_is_left() -> None:
    before = hygiene.look()
    rounds = 50
    start = time.process_time()
    for _ in range(rounds):
        assert hygiene.leftovers(before) == []
    assert (time.process_time() - start) / rounds < 0.005


def test_everything_allowed_has_a_reason_and_a_kind_that_is_looked_for() -> None:
    for one in hygiene.ALLOWED:
        assert one.reason
        assert one.kind in {*hygiene.look().own, "variable"}


# In pytest itself

INNER = """
import os, subprocess
import pytest

def test_leaks():
    os.environ["FORGOTTEN"] = "1"

def test_is_innocent():
    pass

def test_fails_and_leaks():
    os.environ["FORGOTTEN"] = "2"
    assert False

def test_starts_a_process():
    subprocess.run(["true"])

@pytest.mark.processes
def test_may_start_a_process():
    subprocess.run(["true"])

@pytest.fixture(scope="module")
def started():
    subprocess.run(["true"])

def test_starts_a_process_in_a_fixture(started):
    pass
"""


@pytest.mark.processes
def test_in_pytest_the_guilty_test_has_an_error_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "unit" / "test_inner.py"
    file.parent.mkdir()
    file.write_text(INNER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA", str(file)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    results = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    assert {name for result, name in results if result == "ERROR"} == {
        "test_leaks",
        "test_starts_a_process",
        "test_starts_a_process_in_a_fixture",
    }, done.stdout
    assert [name for result, name in results if result == "FAILED"] == ["test_fails_and_leaks"]
    assert "environment variable FORGOTTEN" in done.stdout
    assert "this one ran [\"subprocess.Popen('true', ['true'])\"]" in done.stdout
