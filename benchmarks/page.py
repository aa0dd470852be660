"""The page: from a record to the screen, frames with many workers, opening a large run, and following many files.

python benchmarks/page.py

The first two are measured in the system's chromium, without a screen. Opening is measured beside TensorBoard's own
reader on the same values, in turns. Of following, processor time is counted.
"""

import contextlib
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import arguments, interleave, show, write
from summaries import Findings, Measured, ratio

from manyhands.dashboard.followed import POLL_S, Followed
from manyhands.telemetry.lines import encode
from manyhands.telemetry.read import Tail

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEP_S = 0.1  # of the made-up runs
SEEN = """() => {
  window.seen = []; window.frames = []; let said = "", last = performance.now();
  const look = (now) => {
    window.frames.push(now - last); last = now;
    const tile = [...document.querySelectorAll(".tile")].find((one) => one.textContent.startsWith("Progress"));
    const text = tile?.querySelector("dd").firstChild?.textContent ?? "";
    if (text !== said) { said = text; window.seen.push([Number(text.replaceAll(",", "")), Date.now() / 1000]); }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def line(rank: int, step: int, t: float) -> bytes:
    """A step as a recorder writes it."""
    compute_s = 0.06 * random.uniform(0.9, 1.1)
    return encode(
        {
            **{"kind": "step", "t": t, "rank": rank, "step": step, "epoch": 0},
            **{"loss": 2.3 * math.exp(-step / 800) + random.uniform(0, 0.1), "samples": 32},
            **{"compute_s": compute_s, "wait_s": 0.09 - compute_s, "exchange_s": 0.002, "update_s": 0.001},
        }
    )


def made_up(place: Path, workers: int, steps: int) -> Path:
    """A run of so many workers and steps, which ended a minute ago."""
    (place / "events").mkdir(parents=True)
    began_t = time.time() - 60 - steps * STEP_S
    start = {"kind": "start", "t": began_t, "workers": workers, "model": "mlp", "data": "digits"}
    for rank in range(workers):
        lines = [encode({**start, "rank": rank, "total_steps": steps})]
        lines += [line(rank, step, began_t + step * STEP_S) for step in range(1, steps + 1)]
        (place / "events" / f"worker-{rank}.jsonl").write_bytes(b"".join(lines))
    return place


@contextlib.contextmanager
def growing(place: Path, workers: int, first: int, period_s: float) -> Iterator[dict[int, float]]:
    """Every worker makes a step in each period; gives when each step was written."""
    written: dict[int, float] = {}
    is_over = threading.Event()

    def write() -> None:
        step = first
        while not is_over.wait(period_s):
            for rank in range(workers):
                with open(place / "events" / f"worker-{rank}.jsonl", "ab", buffering=0) as file:
                    file.write(line(rank, step, time.time()))
            written[step] = time.time()
            step += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def browsed(runs: Path, run: str) -> Iterator[Any]:
    """The run's page in a real browser."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "manyhands", "dash", str(runs), "--port", "0"]
    dash = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert dash.stdout is not None
    try:
        dash.stdout.readline()
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(dash.stdout.readline().strip())
            page.evaluate("run => { location.hash = `#/run/${run}` }", run)
            page.get_by_role("heading", name=run).wait_for()
            yield page
            browser.close()
    finally:
        dash.send_signal(signal.SIGINT)
        dash.communicate()


def watched(workers: int, seconds: float, period_s: float) -> tuple[list[float], list[float]]:
    """Seconds from a record to the screen, and milliseconds between frames."""
    with tempfile.TemporaryDirectory() as folder:
        place = made_up(Path(folder) / "run", workers, 50)
        with browsed(Path(folder), "run") as page, growing(place, workers, 51, period_s) as written:
            page.wait_for_timeout(3000)
            page.evaluate(SEEN)
            page.wait_for_timeout(1000 * seconds)
            seen, frames = page.evaluate("[window.seen, window.frames]")
    delays = [t - written[int(step)] for step, t in seen[1:] if int(step) in written]
    return delays, frames[5:]


def opened_s(place: Path) -> float:
    """Until the page knows the whole run."""
    followed, began_s = Followed(place), time.perf_counter()
    while followed.is_behind or not followed.version:
        followed.read()
    json.loads(followed.message(0)[1])
    return time.perf_counter() - began_s


def by_tensorboard_s(folder: Path) -> float:
    """The same values, in a folder for each worker, until its server has them."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    began_s = time.perf_counter()
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return time.perf_counter() - began_s


def as_tensorboard(folder: Path, workers: int, steps: int) -> Path:
    """Loss and the parts of the time of each worker, as its users would log them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for rank in range(workers):
        writer = EventFileWriter(str(folder / f"worker-{rank}"))
        for step in range(1, steps + 1):
            values = [
                Summary.Value(tag=tag, simple_value=random.random())
                for tag in ("loss", "samples", "compute_s", "wait_s", "exchange_s", "update_s")
            ]
            writer.add_event(Event(wall_time=float(step), step=step, summary=Summary(value=values)))
        writer.close()
    return folder


def following_share(files: int, seconds: float) -> float:
    """The part of a core that following so many files takes, each of which grows twice a second."""
    with tempfile.TemporaryDirectory() as folder:
        place = made_up(Path(folder) / "run", files, 1)
        writer = subprocess.Popen([sys.executable, __file__, "--grow", str(place), str(files)])
        try:
            tail = Tail(place)
            while not tail.poll() or tail.is_behind:
                time.sleep(0.1)
            began_s, began_cpu_s, records = time.monotonic(), time.process_time(), 0
            while time.monotonic() < began_s + seconds:
                records += len(tail.poll())
                time.sleep(POLL_S)
            spent_s = time.process_time() - began_cpu_s
            assert records
            return spent_s / (time.monotonic() - began_s)
        finally:
            writer.kill()
            writer.wait()


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))] if values else math.nan


def main() -> None:
    if sys.argv[1:2] == ["--grow"]:
        with growing(Path(sys.argv[2]), int(sys.argv[3]), 2, 0.5):
            signal.pause()
    parser = arguments("The page: how soon, how smoothly, and at what cost.", rounds=3)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default 20)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.workers, options.steps, options.seconds = 1, 10, 20, 2.0
    rounds, workers = range(options.rounds), options.workers
    found = Findings(title="the page")
    results: dict[str, Any] = {}
    if CHROMIUM is None:
        print("there is no chromium here: nothing is measured in a browser", file=sys.stderr)
    else:
        results["pixel_s"] = [p95(watched(2, options.seconds, 0.4)[0]) for _ in rounds]
        results["frame_ms"] = [p95(watched(workers, options.seconds, 1.0)[1]) for _ in rounds]
        found.measured.append(
            Measured(of="record written to pixel, p95", unit="s", values={"2 workers": results["pixel_s"]})
        )
        found.measured.append(
            Measured(
                of="between frames, p95", unit="ms", values={f"{workers} live workers": results["frame_ms"]}
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        ours = made_up(Path(folder) / "run", workers, options.steps)
        theirs = as_tensorboard(Path(folder) / "tensorboard", workers, options.steps)
        contenders = {"the page": lambda: opened_s(ours), "TensorBoard": lambda: by_tensorboard_s(theirs)}
        times = interleave(contenders, options.rounds, "opening")
    results["opening_s"] = times
    found.measured.append(
        Measured(of=f"opening {workers} workers × {options.steps} steps", unit="s", values=times)
    )
    found.ratios.append(
        ratio("the page ÷ TensorBoard, opening", times["the page"], times["TensorBoard"], 0.2, at_most=True)
    )
    results["following"] = [following_share(workers, options.seconds) for _ in rounds]
    found.measured.append(
        Measured(of="following", unit="of a core", values={f"{workers} growing files": results["following"]})
    )
    results["ratios"] = [line.record() for line in found.ratios]
    show(found)
    write(options, benchmark="page", results=results, summaries={"page": found})


if __name__ == "__main__":
    main()
