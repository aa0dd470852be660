"""The display: says the right figures, fits the terminal, and nothing in a record can break it."""

import fcntl
import io
import math
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.launching.display import Display, draw
from manyhands.launching.words import say, wrapped
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


def test_the_loss_is_that_of_the_last_step_over_all_workers() -> None:
    """Not smoothed: a loss that has fallen to 1.0 is shown as 1.0."""
    digest = digest_of(2, 40)
    assert digest.loss == 2.0
    step = {"kind": "step", "t": 1021.0, "step": 41, "epoch": 0}
    digest.add([{**step, "rank": 0, "loss": 1.5}, {**step, "rank": 1, "loss": 0.5}])
    assert "loss 1.000" in text_of(digest)


def test_what_scripts_log_is_shown_as_the_mean_over_workers() -> None:
    digest = digest_of(2, 40)
    log = {"kind": "log", "t": 1021.0, "step": 41}
    digest.add([{**log, "rank": 0, "values": {"rate": 0.5}}, {**log, "rank": 1, "values": {"rate": 1.5}}])
    digest.add([{**log, "rank": 1, "values": {"norm": 3.0, "odd": "x"}}, {**log, "rank": 0, "values": 7}])
    assert digest.logged == {"rate": 1.0, "norm": 3.0}
    assert "rate 1" in text_of(digest)


def test_a_loss_that_is_nan_is_shown_at_once_and_can_pass() -> None:
    digest = digest_of(1, 40)
    step = {"kind": "step", "t": 1021.0, "rank": 0, "step": 41, "epoch": 0}
    digest.add([{**step, "loss": math.nan}])
    assert "loss nan" in text_of(digest)
    digest.add([{**step, "loss": 2.0}])
    assert digest.loss == 2.0


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


def test_members_that_have_gone_are_not_shown() -> None:
    digest = digest_of(4, 5)
    digest.add([{"kind": "death", "t": 1003.0, "rank": 2}])
    later = [{**one, "t": one["t"] + 4, "rank": 4} for one in records(1, 5)]
    digest.add([*later, {"kind": "join", "t": 1003.5, "rank": 4}, *records(4, 5)[-2:-1]])
    assert list(digest.rates()) == [0, 1, 3, 4], "what worker 2 had recorded before comes too late"
    assert digest.missing == []
    assert "has not reported" not in text_of(digest)
    digest.add([{"kind": "host", "t": 1006.0, "rank": -1, "ranks": [3, 4], "host": "10.0.0.2"}])
    digest.add([{"kind": "leave", "t": 1006.0, "rank": 1}])
    assert list(digest.rates()) == [0]
    digest.add(
        [{"kind": "host", "t": 1006.0, "rank": -1, "ranks": "3"}, {"kind": "again", "t": 1007.0, "rank": -1}]
    )
    assert (digest.missing, digest.step) == ([0, 1, 2, 3], 0), "all begin again"


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


@pytest.mark.parametrize("width", range(28, 120))
def test_a_narrow_terminal_has_loss_and_speed_rather_than_a_bar(width: int) -> None:
    digest = digest_of(2, 60)
    for worker in digest.workers.values():
        worker.loss = 0.00451299
    drawn = draw(digest, 65.0, width=width)
    assert re.search(r"60/100  loss 0\.00451(3|)  128( samples)?/s", drawn[0].plain)


@pytest.mark.parametrize("width", [1, 10, 33, 80])
def test_sentences_break_between_words(width: int) -> None:
    text = (
        "one sentence with /a/path/that/is/longer/than/ten/columns in it\n  cp a command /to/be/copied\nend"
    )
    lines = wrapped(text, width).split("\n")
    assert " ".join(lines).split() == text.split()
    assert "  cp a command /to/be/copied" in lines
    assert all(len(line) <= width or " " not in line for line in lines if not line.startswith("  "))
    assert wrapped(text, None) == text


def test_what_is_printed_on_a_narrow_terminal_keeps_its_words(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 32, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream, os.fdopen(master, "rb", buffering=0) as screen:
        with Display(tmp_path, 1, stream=stream) as progress:
            progress.print_line("worker 1 died (killed by SIGKILL): noticed after 0.01 s")
        say("error: a sentence for a person at a terminal of 32 columns, the end.", stream)
        shown = ""
        while "end." not in shown:
            shown += screen.read(1 << 16).decode()
    assert "worker 1 died (killed by\r\nSIGKILL): noticed after 0.01 s" in shown
    assert "error: a sentence for a person\r\nat a terminal of 32 columns, the\r\nend." in shown


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
