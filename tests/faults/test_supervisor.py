"""Workers and launchers die in every way there is: the right one is named and nothing stays behind."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from manyhands.cluster.launcher import cores, killed_groups, supervisor
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.errors import ManyhandsError

LONG_S = 30.0


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    gc.collect()  # what earlier tests still hold in cycles goes now, or in the middle of this test
    descriptors, children, handlers, threads = _what_this_process_holds()
    yield
    descriptors_now, children_now, handlers_now, threads_now = _what_this_process_holds()
    assert not descriptors_now - descriptors, "open descriptors left behind"
    assert not children_now - children, "child processes left behind"
    assert not threads_now - threads, "threads left behind"
    assert handlers_now == handlers


def _what_this_process_holds() -> tuple[Counter[str], Counter[str], list[object], Counter[str]]:
    descriptors: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            descriptors[os.readlink(f"/proc/self/fd/{name}")] += 1
    children = Counter(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    handlers: list[object] = [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    return descriptors, children, handlers, Counter(thread.name for thread in threading.enumerate())


@dataclass(kw_only=True)
class Heard:
    """What a run said."""

    outcome: Outcome
    lines: list[tuple[int, str]] = field(default_factory=list)
    ticks: int = 0

    def of(self, rank: int) -> list[str]:
        return [line for speaker, line in self.lines if speaker == rank]


Run = Callable[..., Heard]


@pytest.fixture(params=[None, "json"], ids=["apart", "forked"])
def load(request: pytest.FixtureRequest) -> str | None:
    """Whether the workers are started one by one, or as forks of a process that has loaded something."""
    loaded: str | None = request.param
    return loaded


@pytest.fixture
def run(tmp_path: Path, load: str | None) -> Run:
    """Run the same little script in every worker; what HEAD defines is at hand in it."""

    def run_script(
        body: str, *arguments: str, workers: int = 2, prefix: Callable[[int], list[str]] | None = None
    ) -> Heard:
        lines: list[tuple[int, str]] = []
        ticks: list[None] = []
        outcome = supervisor.run(
            LaunchPlan(
                command=[_script(tmp_path, body), *arguments],
                workers=workers,
                layout=cores.layout(workers, 1),
                environ={"GREETING": "good morning"},
                run_dir=tmp_path / "run",
                prefix=prefix,
                load=load,
            ),
            on_tick=lambda: ticks.append(None),
            on_line=lambda rank, line: lines.append((rank, line)),
        )
        return Heard(outcome=outcome, lines=lines, ticks=len(ticks))

    return run_script


# Workers wait for each other through files, so that no test depends on who starts faster.
HEAD = """
import os, sys, time
rank = int(os.environ["MANYHANDS_RANK"])
here = os.path.dirname(os.path.abspath(__file__))

def mark(name):
    with open(os.path.join(here, name + ".part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.path.join(here, name))

def wait_for(name):
    path = os.path.join(here, name)
    while not os.path.exists(path):
        time.sleep(0.01)
    return open(path).read()

"""


def _script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return str(path)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _holders(inode: str) -> list[str]:
    """Descriptors of any process that keep this anonymous memory alive."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:manyhands" in os.readlink(link) and str(link.stat().st_ino) == inode:
                found.append(str(link))
        except OSError:
            continue
    return found


def test_all_finish(run: Run) -> None:
    heard = run(
        """
        print("out", rank, *sys.argv[1:])
        print("err", rank, file=sys.stderr)
        time.sleep(0.4)
        sys.stdout.write("no newline")
        """,
        "--rate",
        "3",
    )
    assert heard.outcome.ok
    assert heard.outcome.exit_code == 0
    for rank in range(2):
        assert sorted(heard.of(rank)) == sorted([f"out {rank} --rate 3", f"err {rank}", "no newline"])
    assert heard.ticks >= 2


def test_what_a_worker_finds(run: Run, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("here = True")
    heard = run(
        """
        import neighbour
        fd = int(os.environ["MANYHANDS_ARENA_FD"])
        print(os.environ["MANYHANDS_SIZE"], os.environ["OMP_NUM_THREADS"], os.environ["GREETING"])
        print("own group", os.getpgrp() == os.getpid(), __name__, os.path.basename(__file__))
        print("pinned", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
        print("arena", os.fstat(fd).st_ino, os.get_inheritable(fd))
        print("run", os.environ["MANYHANDS_RUN_DIR"])
        print("input", os.isatty(0), repr(sys.stdin.read()), os.get_terminal_size(0).columns > 0)
        """,
    )
    assert heard.outcome.ok, heard.outcome
    one, two = heard.of(0), heard.of(1)
    assert one[0] == "2 1 good morning"
    assert one[1] == "own group True __main__ script.py"
    assert one[5] == "input True '' True", "a terminal on which nothing is typed"
    shares = cores.layout(2, 1).cores
    if all(shares):
        assert [one[2], two[2]] == [f"pinned {share[0]}" for share in shares]
    assert one[3] == two[3]
    assert one[3].endswith("False")
    assert one[4] == f"run {tmp_path / 'run'}"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A way for worker 1 to die and what must be said of it."""

    code: str
    message: str
    exit_code: int
    tail: str = ""


FAULTS = {
    "exit code": Fault(code="sys.exit(3)", message="exit code 3", exit_code=3),
    "words": Fault(code="sys.exit('enough')", message="exit code 1", exit_code=1, tail="enough"),
    "exception": Fault(
        code="1 / 0",
        message="ended with ZeroDivisionError: division by zero",
        exit_code=1,
        tail="ZeroDivisionError",
    ),
    "an exception of many lines": Fault(
        code="raise ValueError('shapes differ:\\nexpected: 3\\ngot: 4')",
        message="ended with ValueError: shapes differ:",
        exit_code=1,
        tail="got: 4",
    ),
    "refusal": Fault(
        code="from manyhands.errors import UsageError; raise UsageError('4 is not 6.')",
        message="exit code 2",
        exit_code=2,
        tail="error: 4 is not 6.",
    ),
    "SIGKILL": Fault(code="os.kill(os.getpid(), 9)", message="killed by SIGKILL", exit_code=137),
    "SIGTERM": Fault(
        code="os.kill(os.getpid(), 15); time.sleep(60)", message="told to end by SIGTERM", exit_code=143
    ),
    "SIGSEGV": Fault(
        code="import ctypes; ctypes.string_at(0)",
        message="segmentation fault (SIGSEGV)",
        exit_code=139,
        tail="Fatal Python error: Segmentation fault",
    ),
    "SIGABRT": Fault(code="os.abort()", message="aborted (SIGABRT)", exit_code=134),
    "a thread that never ends": Fault(
        code="import threading; threading.Thread(target=time.sleep, args=(600,)).start(); 1 / 0",
        message="ended with ZeroDivisionError",
        exit_code=1,
        tail="ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_dead_worker_ends_the_run_and_is_named(run: Run, name: str) -> None:
    fault = FAULTS[name]
    heard = run(
        f"""
        print("pid", os.getpid())
        mark(f"ready-{{rank}}")
        if rank == 1:
            wait_for("ready-0"), wait_for("ready-2")
            print("failing now")
            {fault.code}
        time.sleep(600)
        """,
        workers=3,
    )
    assert "failing now" in heard.of(1)  # the fault fired
    outcome = heard.outcome
    assert not outcome.ok
    assert outcome.rank == 1
    assert "worker 1 of 3" in outcome.message
    assert fault.message in outcome.message
    assert outcome.exit_code == fault.exit_code
    assert any(fault.tail in line for line in outcome.tail) or not fault.tail
    pids = [int(line.split()[1]) for _, line in heard.lines if line.startswith("pid")]
    assert len(pids) == 3
    assert all(_gone(pid) for pid in pids)


def test_a_traceback_shows_the_users_frames_only_and_once(run: Run) -> None:
    heard = run(
        """
        def deep():
            raise KeyError("missing")
        deep()
        """
    )
    tail = heard.outcome.tail
    assert tail[0] == "Traceback (most recent call last):"
    assert [line.strip().split(", ")[-1] for line in tail if "File" in line] == ["in <module>", "in deep"]
    assert tail[-1] == "KeyError: 'missing'"
    assert heard.lines == []


@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [
        ("raise KeyError('missing')", 1, "ended with KeyError: 'missing'"),
        ("sys.exit(3)", 3, "died: exit code 3"),
        ("sys.stderr.write('a line without end'); sys.exit(3)", 3, "died: exit code 3"),
    ],
)
def test_who_is_killed_on_the_way_out_has_ended_by_its_own_error(
    code: str, exit_code: int, how: str, run: Run
) -> None:
    heard = run(f"import atexit, os, sys\natexit.register(os.kill, os.getpid(), 9)\n{code}", workers=1)
    assert heard.outcome.exit_code == exit_code
    assert how in heard.outcome.message
    assert [line for _, line in heard.lines] == (["a line without end"] if "line" in code else [])


def test_a_long_traceback_is_shown_whole(run: Run) -> None:
    code = "\n".join(f"def f{n}(): f{n + 1}()" for n in range(60))
    tail = run(f"{code}\nf0()").outcome.tail
    assert sum("File" in line for line in tail) == 61
    assert tail[-1].startswith("NameError")


def test_a_syntax_error_is_shown_as_python_does(run: Run) -> None:
    tail = run("def (:").outcome.tail
    assert tail[-1].startswith("SyntaxError")
    assert not any("runpy" in line or "worker.py" in line for line in tail)


def test_who_lost_its_peer_is_not_blamed(run: Run) -> None:
    heard = run(
        """
        from manyhands.errors import PeerLost
        if rank == 0:
            wait_for("ready-1")
            print("lost my peer")
            mark("lost")
            raise PeerLost("worker 1 is gone")
        mark("ready-1")
        peer = wait_for("lost")
        while os.path.exists(f"/proc/{peer}"):
            time.sleep(0.01)
        print("dying after my peer")
        os.kill(os.getpid(), 9)
        """
    )
    assert "dying after my peer" in heard.of(1)
    assert "lost my peer" in heard.of(0)
    assert heard.outcome.rank == 1
    assert "killed by SIGKILL" in heard.outcome.message


def test_lost_peers_alone_are_told_as_such(run: Run) -> None:
    outcome = run("from manyhands.errors import PeerLost; raise PeerLost('worker 9 is gone')").outcome
    assert outcome.exit_code == 70
    assert outcome.tail == ("error: worker 9 is gone",)


def test_stubborn_workers_and_their_children_are_killed(run: Run) -> None:
    heard = run(
        """
        import signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pid", os.getpid())
        print("pid", subprocess.Popen(["sleep", "600"]).pid)
        if rank == 1:
            wait_for("ready-0")
            os._exit(5)
        mark("ready-0")
        time.sleep(600)
        """
    )
    assert "exit code 5" in heard.outcome.message
    pids = [int(line.split()[1]) for _, line in heard.lines if line.startswith("pid")]
    assert len(pids) == 4
    assert _wait_until(lambda: all(_gone(pid) for pid in pids))


def test_children_of_a_worker_that_finishes_go_too(run: Run) -> None:
    heard = run("import subprocess; print(subprocess.Popen(['sleep', '600']).pid)", workers=1)
    assert heard.outcome.ok
    assert _wait_until(lambda: _gone(int(heard.lines[0][1])))


def test_work_can_be_saved_before_termination(run: Run) -> None:
    heard = run(
        """
        if rank == 1:
            wait_for("ready-0")
            sys.exit(4)
        from manyhands.cluster.worker import entry
        entry.before_termination.append(lambda: print("saved"))
        mark("ready-0")
        time.sleep(600)
        """
    )
    assert heard.outcome.rank == 1
    assert heard.of(0) == ["saved"]


def test_long_lines_and_progress_bars(run: Run) -> None:
    heard = run("print('x' * 300_000); print('1%\\r50%\\r100%')", workers=1)
    assert sum(len(line) for line in heard.of(0)[:-1]) == 300_000
    assert heard.of(0)[-1] == "100%"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["missing.py"], "error: there is no script 'missing.py'"),
        (["-m", "missing.module"], "error: there is no module 'missing.module'"),
        ([], "error: nothing to run"),
    ],
)
def test_what_cannot_be_run_is_refused(command: list[str], words: str) -> None:
    outcome = _run_command(command)
    assert outcome.exit_code == 2
    assert len(outcome.tail) == 1
    assert outcome.tail[0].startswith(words)


def test_a_module_runs_with_its_arguments() -> None:
    lines: list[str] = []
    outcome = _run_command(["-m", "json.tool", "--help"], lines)
    assert outcome.ok
    assert lines[0].startswith("usage:")


def _run_command(command: list[str], lines: list[str] | None = None) -> Outcome:
    return supervisor.run(
        LaunchPlan(
            command=command,
            workers=1,
            layout=cores.layout(1),
            environ={},
            run_dir=None,
        ),
        on_tick=lambda: None,
        on_line=lambda rank, line: None if lines is None else lines.append(line),
    )


def test_a_failing_display_leaves_no_worker(tmp_path: Path, load: str | None) -> None:
    pids: list[int] = []

    def display(rank: int, line: str) -> None:
        pids.append(int(line))
        raise RuntimeError("display broke")

    with pytest.raises(RuntimeError, match="display broke"):
        supervisor.run(
            LaunchPlan(
                command=[_script(tmp_path, "print(os.getpid()); time.sleep(600)")],
                workers=2,
                layout=cores.layout(2),
                environ={},
                run_dir=None,
                load=load,
            ),
            on_tick=lambda: None,
            on_line=display,
        )
    assert len(pids) == 1
    assert _gone(pids[0])


def test_a_prefix_that_cannot_be_started_is_one_sentence(run: Run) -> None:
    with pytest.raises(ManyhandsError, match="cannot start worker 1"):
        run("time.sleep(600)", prefix=lambda rank: [] if rank == 0 else ["no-such-command"])


def test_what_cannot_be_loaded_is_told_with_its_reason() -> None:
    with pytest.raises(ManyhandsError, match="cannot start the workers") as refusal:
        supervisor.run(
            LaunchPlan(
                command=["-m", "json.tool"],
                workers=2,
                layout=cores.layout(2),
                environ={},
                run_dir=None,
                load="no_such_module",
            ),
            on_tick=lambda: None,
            on_line=lambda rank, line: None,
        )
    assert "No module named 'no_such_module'" in str(refusal.value)


def test_however_much_is_said_while_modules_are_loaded_it_is_passed_on(tmp_path: Path) -> None:
    """A pipe that nobody reads yet would be full long before."""
    (tmp_path / "talkative.py").write_text(
        "import sys; print('first', flush=True); [print(n, file=sys.stderr) for n in range(100_000)]; print('last')"
    )
    said: list[tuple[int, str]] = []
    outcome = supervisor.run(
        LaunchPlan(
            command=[
                _script(tmp_path, "sys.stderr.reconfigure(errors='replace'); print('here', file=sys.stderr)")
            ],
            workers=2,
            layout=cores.layout(2),
            environ={"PYTHONPATH": str(tmp_path)},
            run_dir=None,
            load="talkative",
        ),
        on_tick=lambda: None,
        on_line=lambda rank, line: said.append((rank, line)),
    )
    assert outcome.ok
    assert [line for rank, line in said if rank == 0] == ["first", *map(str, range(100_000)), "last", "here"]
    assert [line for rank, line in said if rank == 1] == ["here"]


def test_an_interrupt_before_the_workers_have_hatched_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text("import time; time.sleep(600)")
    ticks: list[None] = []

    def interrupt() -> None:
        ticks.append(None)
        if len(ticks) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    outcome = supervisor.run(
        LaunchPlan(
            command=["-m", "json.tool"],
            workers=2,
            layout=cores.layout(2),
            environ={"PYTHONPATH": str(tmp_path)},
            run_dir=None,
            load="slow_to_load",
        ),
        on_tick=interrupt,
        on_line=lambda rank, line: None,
    )
    assert outcome.message == "interrupted by SIGINT"


def test_forks_do_not_share_their_random_numbers(run: Run) -> None:
    heard = run("import random, numpy; print(random.random(), numpy.random.rand())")
    assert heard.outcome.ok
    assert heard.of(0) != heard.of(1)


LAUNCHER = """
import sys
from manyhands.cluster.launcher import cores, supervisor
from manyhands.cluster.launcher.launch_plan import LaunchPlan
outcome = supervisor.run(
    LaunchPlan(
        command=sys.argv[1:], workers=2, layout=cores.layout(2), environ={}, run_dir=None, load="json"
    ),
    on_tick=lambda: None,
    on_line=lambda rank, line: print(line, flush=True),
)
print(outcome.message, flush=True)
sys.exit(outcome.exit_code)
"""
IGNORE_SIGHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
HEAR_SIGHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # the tests may run under nohup
IGNORE_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


@contextlib.contextmanager
def _launched(folder: Path, body: str, before: str = "") -> Iterator["subprocess.Popen[str]"]:
    """A launcher with two workers as a process of its own, killed if the test fails."""
    command = [sys.executable, "-c", before + LAUNCHER, _script(folder, body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


@pytest.mark.parametrize(
    ("number", "code", "before"),
    [
        (signal.SIGINT, 130, ""),
        (signal.SIGINT, 130, IGNORE_SIGINT),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, HEAR_SIGHUP),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_the_launcher_takes_everything_with_it(
    tmp_path: Path, number: signal.Signals, code: int, before: str
) -> None:
    body = """
    import subprocess
    arena = os.fstat(int(os.environ["MANYHANDS_ARENA_FD"])).st_ino
    print("pids", os.getpid(), subprocess.Popen(["sleep", "600"]).pid, arena)
    time.sleep(600)
    """
    with _launched(tmp_path, body, before=before) as launcher:
        assert launcher.stdout
        said = [launcher.stdout.readline().split() for _ in range(2)]
        pids = [int(pid) for words in said for pid in words[1:3]]
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert not any(_gone(pid) for pid in pids)
        assert _holders(said[0][3])
        launcher.send_signal(number)
        rest = launcher.stdout.read()
        assert launcher.wait(LONG_S) == code
    if number != signal.SIGKILL:
        assert rest == f"interrupted by {number.name}\n"
    everyone = {*pids, *map(int, children)}
    assert _wait_until(lambda: all(_gone(pid) for pid in everyone))
    assert _wait_until(lambda: not _holders(said[0][3]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_name_in_dev_shm_outlives_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """Python's resource tracker, which is in the worker's group, unlinks names when their processes have ended."""
    body = """
    import multiprocessing
    from multiprocessing import resource_tracker
    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        lock = context.Lock()
        child = context.Process(target=time.sleep, args=(600,))
        child.start()
        print("pids", os.getpid(), child.pid, resource_tracker._resource_tracker._pid, lock._semlock.name[1:])
        time.sleep(600)
    """
    with _launched(tmp_path, body) as launcher:
        assert launcher.stdout
        said = [launcher.stdout.readline().split() for _ in range(2)]
        pids = [int(pid) for words in said for pid in words[1:4]]
        files = [Path(f"/dev/shm/sem.{words[4]}") for words in said]
        assert all(file.exists() for file in files)
        launcher.send_signal(number)
        rest = launcher.stdout.read()
        launcher.wait(LONG_S)
    if number != signal.SIGKILL:
        assert rest == f"interrupted by {number.name}\n", "the tracker's complaints are not shown"
        assert not any(file.exists() for file in files)
    assert _wait_until(lambda: all(_gone(pid) for pid in pids))
    assert not any(file.exists() for file in files)


def test_a_resource_tracker_that_does_not_end_is_killed_after_a_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that has left the worker's group holds the tracker's pipe."""
    monkeypatch.setattr(killed_groups, "_GRACE_S", 0.2)
    program = """
    import os, subprocess, time
    from multiprocessing import resource_tracker
    held = resource_tracker.getfd()
    other = subprocess.Popen(["sleep", "600"], start_new_session=True, pass_fds=[held])
    print(other.pid, resource_tracker._resource_tracker._pid, flush=True)
    time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as worker:
        assert worker.stdout
        other, tracker = map(int, worker.stdout.readline().split())
        try:
            killed = killed_groups.KilledGroups()
            killed.kill(worker.pid)
            worker.wait(LONG_S)
            assert not _gone(tracker)
            killed.finish()
            assert _wait_until(lambda: _gone(tracker))
            assert not _gone(other)
        finally:
            os.kill(other, signal.SIGKILL)


def test_workers_die_with_the_launcher_even_if_its_guard_died_before(tmp_path: Path) -> None:
    with _launched(tmp_path, "print(os.getpid()); time.sleep(600)") as launcher:
        assert launcher.stdout
        workers = {int(launcher.stdout.readline()) for _ in range(2)}
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        (guard,) = {int(pid) for pid in children} - workers
        os.kill(guard, signal.SIGKILL)
        launcher.kill()
    assert _wait_until(lambda: all(_gone(pid) for pid in workers))


def test_a_terminal_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    with _launched(tmp_path, "print('up'); time.sleep(1)", before=IGNORE_SIGHUP) as launcher:
        assert launcher.stdout
        assert launcher.stdout.readline() == "up\n"
        launcher.send_signal(signal.SIGHUP)
        assert "all 2 workers finished" in launcher.stdout.read()
        assert launcher.wait(LONG_S) == 0
