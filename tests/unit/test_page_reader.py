"""What the page knows of a run: exact at every zoom, in bounded memory, whatever the files hold."""

import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from manyhands.dashboard.answers import COLUMNS, snapshot, zoomed
from manyhands.dashboard.buckets import Buckets
from manyhands.dashboard.followed import Followed
from manyhands.dashboard.run_list import RunList
from manyhands.dashboard.worker_times import MOST_COLUMNS, WorkerTimes
from manyhands.telemetry import lines
from tests.page_server import Browser, append, hear, say, serving, step_record, write_run

LIVE_S = 0.25


def read_whole(place: Path) -> Followed:
    followed = Followed(place)
    followed.read()
    while followed.is_behind:
        followed.read()
    return followed


def test_a_spike_of_one_step_in_a_hundred_thousand_is_seen_at_every_zoom() -> None:
    series, steps, spike = Buckets(0.0, 1.0), np.arange(100_000.0), 54_321
    values = np.ones(len(steps))
    values[spike] = 50.0
    for begin in range(0, len(steps), 777):  # as it comes while a run goes on
        series.add(steps[begin : begin + 777], values[begin : begin + 777])
    for reach in (60_000, 20_000, 3_000, 400, 50):
        for most in (100, 300, 1000):
            first, last = max(spike - reach, 0), spike + reach
            columns = series.columns(first, last, group=series.group(first, last, most=most))
            assert columns.high.max() == 50.0
            place = int(columns.high.argmax())
            assert columns.x[place] <= spike < columns.x[place] + columns.width
            assert len(columns.x) <= most + 2
    assert series._used <= 1 << 14


def test_buckets_say_of_every_width_what_numpy_says() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.uniform(0, 5000, 20_000), generator.normal(size=20_000)
    series = Buckets(0.0, 0.5, capacity=256)
    for part in np.array_split(np.arange(len(x)), 37):
        series.add(x[part], y[part])
    columns = series.columns(group=2)
    for place, begin in enumerate(columns.x):
        inside = y[(x >= begin) & (x < begin + columns.width)]
        assert columns.mean[place] == pytest.approx(inside.mean())
        assert (columns.low[place], columns.high[place]) == (inside.min(), inside.max())
    assert columns.total.sum() == pytest.approx(y.sum())


@pytest.mark.parametrize("x", [np.nan, np.inf, -1.0, 1e300])
def test_absurd_places_and_values_are_left_out(x: float) -> None:
    series = Buckets(0.0, 1.0)
    series.add(np.array([x, 3.0, 4.0]), np.array([1.0, np.nan, 2.0]))
    assert series.columns().x.tolist() == [4.0]


def test_changes_are_told_from_where_they_are() -> None:
    series = Buckets(0.0, 1.0)
    series.add(np.array([0.0, 9.0]), np.array([1.0, 1.0]))
    assert series.take_changed() == 0.0
    assert series.take_changed() == np.inf
    series.add(np.array([7.0]), np.array([1.0]))
    assert series.take_changed() == 7.0


def test_what_is_pushed_adds_up_to_the_whole(tmp_path: Path) -> None:
    """A page that takes every change ends with the same curves as one that comes later."""
    place = write_run(tmp_path / "a", workers=2, steps=1)
    followed, began_t = Followed(place), time.time() - 60
    shown: dict[str, dict[str, list[float]]] = {}
    for begin in range(2, 2600, 260):  # beyond what has a column of its own
        for rank in (0, 1):
            append(
                place,
                rank,
                *(step_record(rank, s, began_t + s / 100, s % 7) for s in range(begin, begin + 260)),
            )
        followed.read()
        version, message = followed.message(followed.version - 1)
        assert version == followed.version
        for name, curve in (lines.decode(_as_record(message)) or {})["curves"].items():
            known = shown.setdefault(name, {"x": [], "mean": []})
            start = curve["from"]
            keep = sum(x < start for x in known["x"]) if start is not None else 0
            shown[name] = {key: known[key][:keep] + curve[key] for key in known}
    for name, curve in snapshot(followed)["curves"].items():
        assert shown[name]["x"] == curve["x"], name
        assert shown[name]["mean"] == pytest.approx(curve["mean"])
    assert len(shown["step:loss"]["x"]) > COLUMNS / 2


def _as_record(message: bytes) -> bytes:
    return message[:-1] + b',"kind":"x","t":1.0,"rank":0}'


def test_workers_over_time_are_bounded_and_shares_add_up() -> None:
    times = WorkerTimes(0.0, 0.25)
    for t in np.linspace(1, 5000, 60):
        row = [[0.5, 0.0, 0.2, 0.1, 0.1, 1.0, 32.0], [0.3, 0.0, 0.7, 0.2, 0.0, 1.0, 32.0]]
        times.add(np.array([0, 1]), np.array([t, t]), np.array(row))
    assert times.columns <= MOST_COLUMNS
    shares = times.shares(recent=False)
    assert shares.sum(axis=1) == pytest.approx([1.0, 1.0])
    assert shares[0] == pytest.approx([0.5, 0.0, 0.2, 0.1, 0.1, 0.1])
    assert shares[1, 2] == pytest.approx(0.7 / 1.2), "parts that overlap share the whole"
    picture = times.picture("wait")
    assert picture.shape == (2, times.columns)
    assert set(np.unique(picture)) == {50, 148, 255}, "255 is where nothing is known"
    assert times.picture("wait", times.columns - 2).shape == (2, 2)


GARBAGE = [
    b"\xff\xfe\x00garbage\n",
    b'{"kind":"step"\n',
    b"[]\n",
    b'{"kind":"step","t":1e999,"rank":0}\n',
    b'{"kind":"step","t":TIME,"rank":0,"step":"x","loss":[],"samples":{}}\n',
    b'{"kind":"step","t":TIME,"rank":-5,"step":3,"loss":1,"samples":1}\n',
    b'{"kind":"step","t":TIME,"rank":99999999999,"step":3,"loss":1,"samples":1}\n',
    b'{"kind":"step","t":TIME,"rank":0,"step":99999999999999999999,"loss":1,"samples":1}\n',
    b'{"kind":"step","t":9e18,"rank":0,"step":7,"loss":1,"samples":1}\n',
    b'{"kind":"evaluate","t":TIME,"rank":0,"accuracy":"<b>"}\n',
    b'{"kind":"updates","t":TIME,"rank":0,"staleness":{"x":1,"-1":2,"3":-4,"2":"a","1":5}}\n',
    b'{"kind":"log","t":TIME,"rank":0,"step":3,"values":{"a":"<script>","b":[1],"c":1.5}}\n',
    b'{"kind":"usage","t":TIME,"rank":0,"processes":[],"interfaces":3,"cores":"many"}\n',
    b'{"kind":"usage","t":TIME,"rank":0,"processes":{"a":3},"interfaces":{"e":4},"cores":0}\n',
    b'{"kind":"start","t":TIME,"rank":0,"total_steps":-3,"workers":[]}\n',
    b'{"kind":"host","t":TIME,"rank":-1,"ranks":[[1],"x",2]}\n',
    b'{"kind":"death","t":TIME,"rank":1,"how":' + b'"' + b"x" * 100_000 + b'"}\n',
    b'{"kind":"checkpoint","t":TIME,"rank":0,"a":' + b"[" * 500 + b"]" * 500 + b"}\n",
    b"x" * (5 << 20) + b"\n",
]


def test_garbage_costs_its_own_lines_only(tmp_path: Path) -> None:
    place = write_run(tmp_path / "a", workers=1, steps=20)
    with open(place / "events" / "worker-0.jsonl", "ab") as file:
        for line in GARBAGE:
            file.write(line.replace(b"TIME", str(time.time() - 30).encode()))
    append(place, 0, step_record(0, 21, time.time() - 20))
    os.mkfifo(place / "events" / "pipe.jsonl")
    (place / "events" / "folder.jsonl").mkdir()
    followed = read_whole(place)
    message = snapshot(followed)
    assert message["curves"]["step:loss"]["x"] == list(map(float, range(1, 22)))
    assert message["head"]["step"] == 21
    assert message["staleness"] == [(1, 5)]
    assert followed.damaged >= 4
    assert len(str(message["events"])) < 3000


def test_a_file_that_is_thinned_cut_or_begun_again_goes_on(tmp_path: Path) -> None:
    place = write_run(tmp_path / "a", workers=1, steps=100)
    path, began_t = place / "events" / "worker-0.jsonl", time.time() - 50
    followed = read_whole(place)
    thinned = path.with_suffix(".thinned")
    thinned.write_bytes(
        b"".join(line for n, line in enumerate(path.read_bytes().splitlines(True)) if n % 2 == 0)
    )
    thinned.replace(path)
    append(place, 0, step_record(0, 101, began_t))
    followed.read()
    assert followed.view.step == 101
    before = followed.view.by_step["loss"].columns().total.sum()
    with open(path, "ab") as file:
        file.write(lines.encode(step_record(0, 102, began_t + 1))[:30])  # a line that is still being written
    followed.read()
    assert followed.view.by_step["loss"].columns().total.sum() == before
    path.write_bytes(lines.encode({"kind": "start", "t": began_t + 2, "rank": 0, "workers": 1}))
    append(place, 0, step_record(0, 103, began_t + 3))
    followed.read()
    assert followed.view.step == 103
    path.unlink()
    assert not followed.read()


def test_a_run_that_is_resumed_forgets_who_was_gone(tmp_path: Path) -> None:
    place, t = write_run(tmp_path / "a", workers=2, steps=10), time.time() - 50
    events = place / "events" / "launcher.jsonl"
    events.write_bytes(lines.encode({"kind": "death", "t": t, "rank": -1} | {"rank": 1, "how": "killed"}))
    followed = read_whole(place)
    assert followed.view.happenings.gone == {1}
    for rank in (0, 1):
        append(place, rank, {"kind": "start", "t": t + 9, "rank": rank}, step_record(rank, 500, t + 10))
    followed.read()
    assert followed.view.happenings.gone == set()
    rate = followed.view.by_time["samples"].columns().total
    assert rate.max() < 32 * 200, "what lies between was not made in one step"


def test_a_long_run_is_read_a_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.dashboard.followed.AT_ONCE_BYTES", 50_000)
    followed = Followed(write_run(tmp_path / "a", workers=4, steps=500))
    reads = 0
    while followed.is_behind:
        followed.read()
        reads += 1
    assert reads > 3
    assert followed.view.step == 500
    assert zoomed(followed, "step:loss", 100, 110, 50)["x"] == list(map(float, range(100, 111)))


def test_the_list_says_how_runs_stand(tmp_path: Path) -> None:
    write_run(tmp_path / "old", steps=5, model="cnn")
    done = write_run(tmp_path / "done", steps=5)
    (done / "summary.json").write_text('{"accuracy": 0.5, "samples_per_second": "no number", "loss": 1}')
    (done / "plan.json").write_text('{"model": "<b>", "data": 3, "cluster": []}')
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "asked.json").write_text("{}")
    (tmp_path / "failed" / "terminal.log").write_text("$ manyhands train\nerror: no such data\n")
    os.utime(tmp_path / "failed" / "terminal.log", (1, 1))
    for place in (tmp_path / "old", done):
        for path in (place / "events").iterdir():
            os.utime(path, (time.time() - 100,) * 2)
    write_run(tmp_path / "live", steps=5)
    (tmp_path / "no run").mkdir()
    (tmp_path / ".hidden").mkdir()
    rows = {row["name"]: row for row in RunList(tmp_path).rows()}
    assert next(iter(rows)) == "live"
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"live": "live", "old": "stopped", "done": "finished", "failed": "failed"}
    assert (rows["old"]["model"], rows["old"]["steps"]) == ("cnn", 5.0)
    assert (rows["done"]["accuracy"], rows["done"]["samples_per_second"]) == (0.5, None)
    assert rows["failed"]["error"] == "error: no such data"
    [only] = RunList(done).rows()
    assert only["name"] == "done"


def test_a_new_point_is_pushed_within_a_quarter_of_a_second(tmp_path: Path) -> None:
    """The median of ten; the page adds what drawing takes."""
    place = write_run(tmp_path / "a", workers=2, steps=20)
    took_s = []
    with serving(tmp_path) as page, Browser(page).sign_in().websocket() as (connection, _):
        say(connection, '{"run": "a"}')
        _hear_step(connection, 20)
        for step in range(21, 31):
            began_s = time.monotonic()
            append(place, 0, step_record(0, step, time.time()))
            _hear_step(connection, step)
            took_s.append(time.monotonic() - began_s)
            time.sleep(0.02)
    assert sorted(took_s)[5] < LIVE_S


def _hear_step(connection: object, step: int) -> None:
    while True:
        message = hear(connection)  # type: ignore[arg-type]
        curve = message.get("curves", {}).get("step:loss", {"x": []})
        if curve["x"] and curve["x"][-1] == step:
            return


def test_a_run_with_absurd_records_does_not_end_the_page_for_the_others(tmp_path: Path) -> None:
    absurd = write_run(tmp_path / "absurd", workers=1, steps=3)
    (absurd / "plan.json").write_text('{"model": "\\ud800"}')
    with open(absurd / "events" / "worker-0.jsonl", "a") as file:
        for more in ('"kind":"updates","staleness":{"²":3}', '"kind":"plan","total_steps":' + "9" * 400):
            file.write(f'{{"t":{time.time()},"rank":0,{more}}}\n')
    write_run(tmp_path / "sound", steps=3)
    snapshot(read_whole(absurd))
    listed = msgspec.json.decode(msgspec.json.encode(RunList(tmp_path).rows()))
    assert {row["name"] for row in listed} == {"absurd", "sound"}
