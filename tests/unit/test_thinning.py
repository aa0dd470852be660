"""Records of a long run: the file stays short, older step lines become fewer, and no event is ever lost."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands import telemetry
from manyhands.telemetry import event_file, lines, record_log, tensorboard, thinning
from manyhands.telemetry.read import Tail, read

FULL, GROWTH = 64, 1 << 16
STEPS = 40 * FULL


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    telemetry.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of a week what a run of seconds has."""
    monkeypatch.setattr(thinning, "FULL", FULL)
    monkeypatch.setattr(record_log, "GROWTH_BYTES", GROWTH)


def step_line(step: int, rank: int = 0, **more: Any) -> lines.Record:
    return {"kind": "step", "t": 1000.0 + step, "rank": rank, "step": step, "samples": 8, **more}


def written(run: Path, records: list[lines.Record], rank: int = 0) -> Path:
    path = run / "events" / f"worker-{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(lines.encode, records)))
    return path


def thin(path: Path) -> None:
    one = thinning.Thinning(path)
    while not one.work():
        pass
    one.replace().close()


def test_lines_by_layer_and_by_class_become_fewer_each_for_themselves(tmp_path: Path) -> None:
    """They are long, and come at steps of their own."""
    every = {"layers": 7, "classes": 23}
    records = [
        {"kind": kind, "t": 1000.0 + step, "rank": 0, "step": step}
        for step in range(1, STEPS)
        for kind, between in every.items()
        if step % between == 0
    ]
    thin(written(tmp_path, records))
    for kind, between in every.items():
        kept = [record["step"] for record in read(tmp_path) if record["kind"] == kind]
        assert {step for step in kept if step > STEPS - FULL} == {
            step for step in range(STEPS - FULL + 1, STEPS) if step % between == 0
        }
        gaps = [after - before for before, after in itertools.pairwise(kept)]
        assert max(gaps) <= max(2 * between, 64)
        assert len(kept) < STEPS / between / 2 or between > 16


def test_the_newest_stay_whole_and_older_ones_become_fewer(tmp_path: Path) -> None:
    path = written(tmp_path, [step_line(step) for step in range(STEPS)])
    thin(path)
    kept = [record["step"] for record in read(tmp_path)]
    assert kept[-2 * FULL :] == list(range(STEPS - 2 * FULL, STEPS))
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert gaps == sorted(gaps, reverse=True)
    assert set(gaps) == {1, 2, 4, 8, 16, 32}
    assert len(kept) < FULL * (2 + math.log2(STEPS / FULL))
    thin(path)
    assert [record["step"] for record in read(tmp_path)] == kept, "what is thinned already stays as it is"


def test_no_event_is_lost_and_counts_add_up(tmp_path: Path) -> None:
    records: list[lines.Record] = []
    for step in range(STEPS):
        t = 1000.0 + step
        records.append(step_line(step))
        records.append({"kind": "log", "t": t, "rank": 0, "step": step, "values": {"dense": step}})
        records.append({"kind": "process", "t": t, "rank": 0, "threads": 3})
        records.append({"kind": "updates", "t": t, "rank": 0, "staleness": {"0": 2, "1": step % 3}})
        if step % 100 == 7:
            records.append({"kind": "log", "t": t, "rank": 0, "step": step, "values": {"now and then": 1}})
        if step % 10 == 3:
            kinds = ("evaluate", "checkpoint", "saved", "warning", "dropped", "start", "end", "death")
            records.append({"kind": kinds[step // 10 % len(kinds)], "t": t, "rank": 0, "step": step})
    path = written(tmp_path, records)
    thin(path)
    kept = list(read(tmp_path))
    thinned = ("step", "log", "process", "updates")
    assert [one for one in kept if one["kind"] not in thinned] == [
        one for one in records if one["kind"] not in thinned
    ]
    count = Counter(one["kind"] for one in kept)
    for kind in ("step", "process", "updates"):
        assert count[kind] < FULL * (2 + math.log2(STEPS / FULL)), kind
    logged = Counter(name for one in kept if one["kind"] == "log" for name in one["values"])
    assert logged["dense"] < FULL * (2 + math.log2(STEPS / FULL))
    assert logged["now and then"] == len(range(7, STEPS, 100)), (
        "a script logs it less often than it is thinned"
    )
    for value in ("0", "1"):
        before, after = (
            sum(one["staleness"].get(value, 0) for one in all_of if one["kind"] == "updates")
            for all_of in (records, kept)
        )
        assert before == after


def bound(steps: int, events: int) -> float:
    """As docs/commands.md states it: a line of a step has at most 350 bytes here, one of an event 100."""
    return GROWTH + 350 * FULL * (2 + math.log2(steps / FULL)) + 100 * events + 4096


def test_a_long_run_s_file_is_bounded_while_it_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "events" / "worker-0.jsonl"
    telemetry.open(path, rank=0)
    tail, followed, inodes = Tail(tmp_path), list[lines.Record](), set[int]()
    steps = 30_000
    for step in range(steps):
        telemetry.count("bytes_sent", step)
        telemetry.step(step=step, epoch=0, loss=0.5, samples=32)
        if step % 100 == 0:
            telemetry.event("checkpoint", step=step, stopped_s=0.5)
        if step % 500 == 0:
            time.sleep(0.02)
            followed += tail.poll()
            inodes.add(path.stat().st_ino)
    deadline = time.monotonic() + 20
    is_written = False
    while time.monotonic() < deadline and not (
        is_written and path.stat().st_size < bound(steps, steps // 100)
    ):
        time.sleep(0.05)
        followed += tail.poll()
        is_written = any(one.get("step") == steps - 1 for one in followed[-10:])
    telemetry.close()
    followed += tail.poll()
    assert len(inodes) >= 2, "the file was thinned while it was followed"
    assert path.stat().st_size < bound(steps, steps // 100)
    assert not list(path.parent.glob("*.thinned"))
    kept = list(read(tmp_path))
    for records in (kept, followed):
        checkpoints = [one["step"] for one in records if one["kind"] == "checkpoint"]
        assert checkpoints == list(range(0, steps, 100))
        assert [one["step"] for one in records if one["kind"] == "step"][-FULL:] == list(
            range(steps - FULL, steps)
        )
    given = [one["step"] for one in followed if one["kind"] == "step"]
    assert given == sorted(set(given)), "each once, in order"


def test_where_there_is_no_room_for_a_copy_the_records_go_on(tmp_path: Path) -> None:
    path = tmp_path / "events" / "worker-0.jsonl"
    path.with_suffix(".thinned").mkdir(parents=True)  # what stands in the way of a copy
    telemetry.open(path, rank=0)
    for step in range(3000):
        telemetry.step(step=step, epoch=0, loss=0.5, samples=32)
    time.sleep(0.4)
    for step in range(3000, 6000):
        telemetry.step(step=step, epoch=0, loss=0.5, samples=32)
    telemetry.close()
    assert [one["step"] for one in read(tmp_path) if one["kind"] == "step"] == list(range(6000))


def test_curves_of_thinned_records_have_true_speeds_and_no_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1's file was thinned earlier than that of worker 0, so it has steps that the other one has not."""
    start = [{"kind": "start", "t": 1000.0, "rank": rank, "workers": 2} for rank in range(2)]
    thin(written(tmp_path, [start[0], *(step_line(step) for step in range(STEPS))]))
    early = written(tmp_path, [start[1], *(step_line(step, rank=1) for step in range(STEPS // 3))], rank=1)
    thin(early)
    with early.open("ab") as file:
        file.writelines(lines.encode(step_line(step, rank=1)) for step in range(STEPS // 3, STEPS - 5))
    points: dict[int, dict[str, float]] = {}
    monkeypatch.setattr(
        event_file.EventWriter, "scalars", lambda self, values, step, t: points.setdefault(step, values)
    )
    tensorboard.export(tmp_path)
    first = {one["step"] for one in read(tmp_path) if one["kind"] == "step" and one["rank"] == 0}
    assert points.keys() == first, "what both have, and the last steps, which worker 1 has not made"
    # One step a second, of 8 samples from each of two workers.
    speeds = [point["samples_per_second"] for step, point in sorted(points.items()) if 16 < step < STEPS - 5]
    assert speeds == pytest.approx([16.0] * len(speeds))
