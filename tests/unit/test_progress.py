"""The display: says the right figures, fits the terminal, and nothing in a record can break it."""

import io
import math
import os
import pty
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cli.display import Display, draw
from manyhands.telemetry import lines
from manyhands.telemetry.digest import Digest


def records(
    workers: int, steps: int, *, total_steps: int | None = 100, step_s: float = 0.5
) -> list[lines.Record]:
    start = {"kind": "start", "t": 1000.0, "total_steps": total_steps, "epochs": 2, "workers": workers}
    out: list[lines.Record] = [{**start, "rank": rank} for rank in range(workers)]
    for step in range(1, steps + 1):
        for rank in range(workers):
            record = {
                "kind": "step",
                "t": 1000 + step * step_s,
                "rank": rank,
                "step": step,
                "epoch": step // 50,
            }
            record |= {"loss": 2.0, "samples": 32, "compute_s": step_s / 2, "wait_s": step_s / 4}
            out.append(record)
    return out


def digest_of(workers: int, steps: int, **options: float | None) -> Digest:
    digest = Digest(workers)
    digest.add(records(workers, steps, **options))  # type: ignore[arg-type]
    return digest


def text_of(digest: Digest, width: int = 120) -> str:
    return "\n".join(line.plain for line in draw(digest, 65.0, width=width))


def append(run: Path, new: list[lines.Record]) -> None:
    for record in new:
        path = run / "events" / f"worker-{record['rank']}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines.encode(record))


def test_figures_follow_from_the_records() -> None:
    digest = digest_of(2, 60)
    assert (digest.step, digest.epoch, digest.epochs, digest.total_steps) == (60, 1, 2, 100)
    assert digest.rates() == {0: pytest.approx(64), 1: pytest.approx(64)}
    assert digest.left_s() == pytest.approx(20)
    assert digest.loss == pytest.approx(2.0)
    assert digest.shares() == {
        "compute": pytest.approx(0.5),
        "wait": pytest.approx(0.25),
        "other": pytest.approx(0.25),
    }


def test_the_display_says_them() -> None:
    digest = digest_of(2, 60)
    evaluation = {"kind": "evaluate", "t": 1030.0, "rank": 0, "step": 60, "accuracy": 0.972}
    digest.add([evaluation])
    text = text_of(digest)
    for piece in ("epoch 2/2", "60/100", "loss 2.000", "128 samples/s", "1:05 elapsed", "0:20 left"):
        assert piece in text
    for piece in ("compute 50%", "wait 25%", "other 25%", "accuracy 97.2%", "0: 64", "1: 64"):
        assert piece in text
    assert "sent" not in text


def test_overlapping_parts_share_the_whole() -> None:
    digest = Digest(1)
    step = {
        "kind": "step",
        "rank": 0,
        "epoch": 0,
        "loss": 1.0,
        "samples": 1,
        "compute_s": 1.0,
        "exchange_s": 1.0,
    }
    digest.add([{**step, "t": float(number), "step": number} for number in range(1, 4)])
    assert digest.shares() == {"compute": 0.5, "exchange": 0.5, "other": 0.0}


def test_bytes_are_shown_when_there_are_any() -> None:
    digest = digest_of(1, 5)
    digest.add([{"kind": "step", "t": 1003.0, "rank": 0, "step": 6, "epoch": 0, "bytes_sent": 3_000_000}])
    assert digest.bytes_per_second() == pytest.approx(1e6, rel=0.2)
    assert re.search(r"sent 1\.\d* MB/s", text_of(digest))


def test_loss_is_smoothed_but_a_nan_is_shown_at_once_and_can_pass() -> None:
    digest = digest_of(1, 40)
    step = {"kind": "step", "t": 1021.0, "rank": 0, "step": 41, "epoch": 0}
    digest.add([{**step, "loss": 4.0}])
    assert 2.0 < (digest.loss or 0) < 2.2
    digest.add([{**step, "loss": math.nan}])
    assert "loss nan" in text_of(digest)
    digest.add([{**step, "loss": 2.0}])
    assert 2.0 < (digest.loss or 0) < 2.2


def test_a_worker_without_a_share_of_the_step_says_nothing_of_the_loss() -> None:
    digest = digest_of(2, 40)
    digest.add(
        [{"kind": "step", "t": 1021.0, "rank": 1, "step": 41, "epoch": 0, "loss": math.nan, "samples": 0}]
    )
    assert digest.loss == pytest.approx(2.0)


def test_a_second_start_record_adds_to_the_first() -> None:
    digest = digest_of(1, 5)
    digest.add([{"kind": "start", "t": 1003.0, "rank": 0, "workers": 1}])
    assert (digest.total_steps, digest.epochs) == (100, 2)


def test_a_loop_without_a_known_end_has_no_bar_and_no_time_left() -> None:
    text = text_of(digest_of(1, 7, total_steps=None))
    assert "step 7" in text
    assert "━" not in text
    assert "left" not in text


def test_workers_that_have_not_reported_are_named() -> None:
    assert "starting 2 workers, 0 ready" in text_of(Digest(2))
    digest = Digest(3)
    digest.add([record for record in records(3, 5) if record["rank"] != 1])
    assert "worker 1 has not reported" in text_of(digest)
    assert digest.step == 5


def test_many_workers_are_summarised() -> None:
    digest = digest_of(64, 5)
    assert "64 (worker 0) to 64 samples/s per worker" in text_of(digest)
    assert "4,096 samples/s" in text_of(digest)


@pytest.mark.parametrize("workers", [1, 2, 8, 9, 64])
@pytest.mark.parametrize("total_steps", [100, None])
def test_no_line_is_wider_than_the_terminal(workers: int, total_steps: int | None) -> None:
    digest = digest_of(workers, 60, total_steps=total_steps)
    digest.add([{"kind": "evaluate", "t": 1030.0, "rank": 0, "step": 60, "accuracy": 0.972}])
    for width in range(1, 200):
        drawn = draw(digest, 65.0, width=width)
        assert all(line.cell_len <= width for line in drawn)
        assert width < 20 or "60" in drawn[0].plain


def test_ascii_terminals_get_ascii() -> None:
    text = "".join(line.plain for line in draw(digest_of(2, 60), 65.0, width=120, ascii_only=True))
    assert text.isascii()


scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
value = scalar | st.lists(scalar, max_size=2) | st.dictionaries(st.text(max_size=3), scalar, max_size=2)
names = [
    "step",
    "epoch",
    "epochs",
    "total_steps",
    "workers",
    "loss",
    "accuracy",
    "samples",
    "compute_s",
    "bytes_sent",
]
record = st.builds(
    lambda kind, t, rank, fields: {**fields, "kind": kind, "t": t, "rank": rank},
    st.sampled_from(["start", "step", "evaluate", "end", "process", "?"]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-1, 3),
    st.dictionaries(st.sampled_from(names), value),
)


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.lists(record, max_size=6), max_size=3))
def test_no_record_can_break_the_display(batches: list[list[lines.Record]]) -> None:
    digest = Digest(2)
    for batch in batches:
        digest.add(batch)
        for width in (5, 80):
            assert all(line.cell_len <= width for line in draw(digest, 1.0, width=width))


def test_without_a_terminal_plain_lines_are_printed(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Display(tmp_path, 2, stream=stream) as progress:
        progress.refresh()
        append(tmp_path, records(2, 10))
        progress.refresh()
        progress.print_line("worker 0: hello")
        append(tmp_path, records(2, 60)[2:])
        progress.refresh()
        evaluation = {"kind": "evaluate", "t": 1031.0, "step": 60, "accuracy": 0.5}
        for rank in range(2):
            append(tmp_path, [{**evaluation, "rank": rank}])
            progress.refresh()
        (tmp_path / "events" / "worker-0.jsonl").open("ab").close()
    printed = stream.getvalue().splitlines()
    assert printed[0] == "worker 0: hello"
    assert printed[1].startswith("epoch 2/2  step  60/100  loss 2.000  128 samples/s")
    assert printed[2:] == ["step 60  accuracy 50.0%"]
    assert "\x1b" not in stream.getvalue()


def test_records_of_an_earlier_run_in_the_same_directory_are_not_shown(tmp_path: Path) -> None:
    append(tmp_path, records(1, 10))
    with Display(tmp_path, 1, stream=io.StringIO()) as progress:
        progress.refresh()
        assert progress.digest.step == 0


def test_on_a_terminal_the_bar_stays_below_printed_lines_and_the_cursor_comes_back(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    shown = ""
    with os.fdopen(slave, "w", encoding="utf-8") as stream, os.fdopen(master, "rb", buffering=0) as screen:
        try:
            with Display(tmp_path, 1, stream=stream) as progress:
                append(tmp_path, records(1, 60))
                progress.refresh()
                progress.print_line("worker 0: \x1b[31mhello\x1b[0m [not markup]")
                progress.refresh()
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("the end", file=stream, flush=True)
        while "the end" not in shown:
            shown += screen.read(1 << 16).decode(errors="replace")
    assert "60/100" in shown
    assert "[not markup]" in shown
    assert shown.index("[not markup]") < shown.rindex("60/100")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_stream_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    with Display(tmp_path, 1, stream=stream) as progress:
        append(tmp_path, records(1, 60))
        progress.refresh()
        progress.print_line("nobody reads this")
    with pytest.raises(BrokenPipeError):
        stream.close()
