"""Telemetry: what is recorded is what is read, whatever happens to the process in between."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from manyhands import telemetry
from manyhands.errors import UsageError
from manyhands.telemetry import lines
from manyhands.telemetry.read import Tail, read


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    telemetry.close()
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}


def opened(run: Path, rank: int = 0) -> Path:
    path = run / "events" / f"worker-{rank}.jsonl"
    telemetry.open(path, rank=rank)
    return path


def records_of(run: Path, kind: str) -> list[lines.Record]:
    return [record for record in read(run) if record["kind"] == kind]


def test_a_step_carries_what_was_counted_since_the_last_one(tmp_path: Path) -> None:
    opened(tmp_path, rank=3)
    telemetry.count("bytes_sent", 100)
    telemetry.add_seconds("compute", 0.5)
    telemetry.step(step=1, epoch=0, loss=2.5, samples=32)
    telemetry.count("bytes_sent", 7)
    telemetry.step(step=2, epoch=1, loss=1.5, samples=16, learning_rate=0.1)
    telemetry.count("bytes_sent", 1)
    assert telemetry.totals() == {"bytes_sent": 108, "compute_s": 0.5}
    telemetry.close()

    first, second = records_of(tmp_path, "step")
    assert time.time() - 60 < first.pop("t") <= second.pop("t") <= time.time()
    assert first == {
        "kind": "step",
        "rank": 3,
        "step": 1,
        "epoch": 0,
        "loss": 2.5,
        "samples": 32,
        "bytes_sent": 100,
        "compute_s": 0.5,
    }
    assert second["bytes_sent"] == 7
    assert second["learning_rate"] == 0.1
    assert "compute_s" not in second


def test_timed_sections_add_up_and_count_when_they_raise() -> None:
    before = telemetry.totals().get("wait_s", 0)
    with telemetry.timed("wait"):
        time.sleep(0.01)
    between = telemetry.totals()["wait_s"]
    with suppress(KeyError), telemetry.timed("wait"):
        time.sleep(0.01)
        raise KeyError
    assert between - before >= 0.01
    assert telemetry.totals()["wait_s"] - between >= 0.01


def test_counting_from_several_threads_loses_nothing() -> None:
    before = telemetry.totals().get("shared", 0)

    def work() -> None:
        for _ in range(50_000):
            telemetry.count("shared", 1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert telemetry.totals()["shared"] - before == 200_000


def test_steps_and_events_of_several_threads_are_all_written(tmp_path: Path) -> None:
    opened(tmp_path)

    def work(thread: int) -> None:
        for index in range(2_000):
            telemetry.event("mark", thread=thread, index=index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    telemetry.close()
    marks = {(record["thread"], record["index"]) for record in records_of(tmp_path, "mark")}
    assert len(marks) == len(records_of(tmp_path, "mark")) == 6_000


def test_without_open_records_are_dropped_and_no_thread_runs() -> None:
    telemetry.step(step=1, epoch=0, loss=0.0, samples=1)
    telemetry.event("start")
    telemetry.close()
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}


def test_opening_again_appends_and_counts_from_zero(tmp_path: Path) -> None:
    opened(tmp_path)
    telemetry.count("bytes_sent", 5)
    telemetry.event("start")
    telemetry.close()
    telemetry.event("lost")
    opened(tmp_path)
    assert telemetry.totals() == {}
    telemetry.event("end")
    telemetry.close()
    kinds = [record["kind"] for record in read(tmp_path)]
    assert kinds == ["start", "process", "end", "process"]


def test_of_threads_that_open_at_once_one_writes(tmp_path: Path) -> None:
    """Another one's thread, if it went on, would write the records of all later runs into its own file."""
    together = threading.Barrier(8)

    def begin(rank: int) -> None:
        together.wait()
        telemetry.open(tmp_path / f"{rank}.jsonl", rank=rank)

    openers = [threading.Thread(target=begin, args=(rank,)) for rank in range(8)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    assert [thread.name for thread in threading.enumerate()].count("telemetry") == 1
    telemetry.close()
    assert "telemetry" not in [thread.name for thread in threading.enumerate()]


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file, not a directory")
    with pytest.raises(UsageError, match=r"worker-0\.jsonl"):
        opened(tmp_path)
    telemetry.event("dropped")


def test_the_process_is_measured(tmp_path: Path) -> None:
    opened(tmp_path)
    busy_until = time.process_time() + 0.05
    while time.process_time() < busy_until:
        pass
    telemetry.close()
    (usage,) = records_of(tmp_path, "process")
    assert usage["cpu_percent"] > 0
    assert usage["memory_bytes"] > 1 << 20
    assert usage["threads"] >= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 1e-300, 0, "text", [1.5, math.inf]])
def test_any_value_survives_the_file(tmp_path: Path, value: object) -> None:
    opened(tmp_path)
    telemetry.event("mark", value=value, nested={"value": value})
    telemetry.close()
    (mark,) = records_of(tmp_path, "mark")
    assert repr(mark["value"]) == repr(mark["nested"]["value"]) == repr(value)


def test_what_json_does_not_know_is_written_as_number_or_text(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    opened(tmp_path)
    telemetry.event("mark", path=Path("a/b"), scalar=numpy.float32(0.5), nan=numpy.float32("nan"))
    telemetry.event("mark", impossible={1, (2, object)}, huge=1 << 80)
    telemetry.event("mark", good=1)
    telemetry.close()
    marks = records_of(tmp_path, "mark")
    assert (marks[0]["path"], marks[0]["scalar"]) == ("a/b", 0.5)
    assert math.isnan(marks[0]["nan"])
    assert marks[-1]["good"] == 1


def run_python(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


OPEN = """
import os, sys, time
from pathlib import Path
from manyhands import telemetry
telemetry.open(Path(sys.argv[1]) / "events" / "worker-0.jsonl", rank=0)
telemetry.event("start")
telemetry.step(step=1, epoch=0, loss=0.5, samples=32)
"""


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "raise ValueError('a bug in a script')"])
def test_a_process_that_ends_without_close_has_written_everything(tmp_path: Path, ending: str) -> None:
    run_python(OPEN + ending, tmp_path)
    assert [record["kind"] for record in read(tmp_path)] == ["start", "step", "process"]


@pytest.mark.processes
def test_a_forked_child_writes_nothing_of_its_parent(tmp_path: Path) -> None:
    child = "\nif os.fork() == 0:\n    telemetry.event('child')\n    sys.exit()\nos.wait()"
    done = run_python(OPEN + child, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [record["kind"] for record in read(tmp_path)] == ["start", "step", "process"]


@pytest.mark.processes
def test_records_reach_the_file_while_the_process_lives_and_survive_its_murder(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", OPEN + "time.sleep(60)", str(tmp_path)])
    try:
        tail, kinds = Tail(tmp_path), []
        while "step" not in kinds:
            kinds += [record["kind"] for record in tail.poll()]
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kinds[:2] == ["start", "step"]


def test_a_line_cut_off_by_a_kill_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = opened(tmp_path)
    telemetry.close()
    path.write_bytes(b'{"kind":"step","t":1.0,"ra')
    opened(tmp_path)
    telemetry.event("start")
    telemetry.close()
    tail = Tail(tmp_path)
    assert [record["kind"] for record in tail.poll()] == ["start", "process"]
    assert tail.damaged == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_once_and_does_not_stop_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "worker-0.jsonl"
    telemetry.open(path, rank=0)
    (own,) = (int(one.name) for one in Path("/proc/self/fd").iterdir() if one.exists() and one.samefile(path))
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), own)
    for index in range(3):
        telemetry.event("mark", index=index)
        time.sleep(0.3)
    telemetry.close()
    assert capfd.readouterr().err.count(f"cannot write {path}") == 1


def test_tail_returns_each_complete_record_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    assert tail.poll() == []
    events = tmp_path / "events"
    events.mkdir()
    line = lines.encode({"kind": "step", "t": 2.0, "rank": 0, "loss": math.nan})
    with (events / "worker-0.jsonl").open("wb", buffering=0) as file:
        file.write(line + line[:10])
        assert len(tail.poll()) == 1
        assert tail.poll() == []
        file.write(line[10:])
        (events / "worker-1.jsonl").write_bytes(lines.encode({"kind": "start", "t": 1.0, "rank": 1}))
        late, early = reversed(tail.poll())
        assert (early["rank"], late["rank"]) == (1, 0)
        assert math.isnan(late["loss"])
    (events / "worker-0.jsonl").write_bytes(line)
    assert len(tail.poll()) == 1, "a file that was begun again is read from its start"
    assert Tail(tmp_path, skip_existing=True).poll() == []
    assert tail.damaged == 0


DAMAGED = [
    b"{",
    b"[]",
    b"3",
    b"\xff\xfe\x00",
    b'{"kind":1,"t":1,"rank":0}',
    b'{"kind":"step","t":"x","rank":0}',
    b'{"kind":"step","t":"inf","rank":0}',
    b'{"kind":"step","t":1' + b"0" * 400 + b',"rank":0}',
    b'{"kind":"step","t":1}',
    b"[" * 100_000,
]


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    good = lines.encode({"kind": "end", "t": 5, "rank": 0})
    (tmp_path / "events" / "worker-0.jsonl").write_bytes(b"\n".join(DAMAGED) + b"\n\n" + good)
    tail = Tail(tmp_path)
    assert tail.poll() == list(read(tmp_path)) == [{"kind": "end", "t": 5, "rank": 0}]
    assert tail.damaged == len(DAMAGED)


def test_read_merges_workers_in_time_order(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    for rank in range(3):
        text = b"".join(
            lines.encode({"kind": "step", "t": 3.0 * step + rank, "rank": rank}) for step in range(4)
        )
        (tmp_path / "events" / f"worker-{rank}.jsonl").write_bytes(text)
    assert [record["t"] for record in read(tmp_path)] == list(range(12))
    assert list(read(tmp_path / "nowhere")) == []


@pytest.mark.processes
def test_neither_telemetry_nor_the_display_imports_torch() -> None:
    modules = "manyhands.telemetry.tensorboard, manyhands.launching.display"
    done = run_python(f"import sys, {modules}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr or "torch was imported"


def test_the_file_is_closed_by_close(tmp_path: Path) -> None:
    def links() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                continue
        return found

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see open files")
    path = opened(tmp_path)
    assert str(path) in links()
    telemetry.close()
    assert str(path) not in links()
