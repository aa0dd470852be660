"""What the records of every step cost: what a step calls, each timed by itself; and training with and without them.

python benchmarks/telemetry.py

The first is a few millionths of a second and can be told anywhere. The second is the whole truth, caches included,
where the machine is calm enough for a hundredth of a step of about 1 ms to be seen.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from common import arguments, interleave, show, table, write
from jobs import JOBS, build, loss, make_batches
from summaries import Findings, Measured, ratio

import manyhands as mh
from manyhands import telemetry

CALLS = ("add_seconds", "count", "event", "step", "timed")


class _Nothing:
    """In the place of whatever is called to record something."""

    def __call__(self, *args: object, **more: object) -> "_Nothing":
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


@contextmanager
def replaced(by: Callable[[str, Any], Any]) -> Iterator[None]:
    """Something else in the place of all that is called to record, given its name and what it was."""
    before: dict[str, Any] = {name: getattr(telemetry, name) for name in CALLS}
    for name, call in before.items():
        setattr(telemetry, name, by(name, call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(telemetry, name, call)


def without() -> AbstractContextManager[None]:
    """Nothing is recorded or even counted."""
    return replaced(lambda name, call: _Nothing())


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """As in a run: a thread writes the file meanwhile."""
    telemetry.open(folder / "worker-0.jsonl", rank=0)
    try:
        yield
    finally:
        telemetry.close()


def calls_of(step: Callable[[], object]) -> dict[str, int]:
    """How often one step calls what."""
    counted: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def record(*args: Any, **more: Any) -> Any:
            counted[name] += 1
            return call(*args, **more)

        return record

    with replaced(counting):
        step()
    return dict(counted)


def seconds_of(name: str, times: int) -> float:
    """Of a processor, for one call; for `step` until its line is written."""

    def timed() -> None:
        with telemetry.timed("compute"):
            pass

    calls: dict[str, Callable[[], None]] = {
        "add_seconds": lambda: telemetry.add_seconds("wait", 0.001),
        "count": lambda: telemetry.count("bytes_sent", 4096),
        "event": lambda: telemetry.event("words", number=1),
        "step": lambda: telemetry.step(step=7, epoch=0, loss=0.123456789, samples=32),
        "timed": timed,
    }
    call = calls[name]
    with tempfile.TemporaryDirectory() as folder:
        with recording(Path(folder)):
            start = time.process_time()
            for _ in range(times):
                call()
        return (time.process_time() - start) / times


def main() -> None:
    parser = arguments("What the records of every step cost.", rounds=150)
    parser.add_argument("--steps", type=int, default=200, help="per turn (default 200)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 3
    torch.set_num_threads(1)
    job = JOBS["small-mlp"]
    session = mh.session(*build(job), loss)
    batch, *_ = make_batches(job, 32, rank=0)
    calls = calls_of(lambda: session.step(batch))
    each_s = {
        name: min(seconds_of(name, 10 * options.steps) for _ in range(options.rounds // 10 or 1))
        for name in calls
    }
    step_s = sum(each_s[name] * count for name, count in calls.items())
    rows = [[name, str(count), f"{each_s[name] * 1e6:.2f}"] for name, count in calls.items()]
    print(table("one step, world of one", ["call", "times", "µs each, at best"], rows))
    print(f"{step_s * 1e6:.1f} µs per step: {step_s / 1e-3:.1%} of 1 ms (target ≤ 1 %)\n")

    def turn(meanwhile: AbstractContextManager[None]) -> float:
        """Seconds of a processor per step, of all threads, until everything is written: what others take away
        meanwhile does not count."""
        with meanwhile:
            session.step(batch)
            start = time.process_time()
            for _ in range(options.steps):
                session.step(batch)
        return (time.process_time() - start) / options.steps

    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            "with": lambda: turn(recording(Path(folder))),
            "without": lambda: turn(without()),
        }
        seconds = interleave(contenders, options.rounds, "records")
        session.close()
    found = findings(calls, each_s, seconds)
    show(found)
    results = {
        "calls": calls,
        "each_s": each_s,
        "step_s": step_s,
        "seconds": seconds,
        "ratios": [line.record() for line in found.ratios],
    }
    write(options, benchmark="telemetry", results=results, summaries={"telemetry": found})


def findings(calls: dict[str, int], each_s: dict[str, float], seconds: dict[str, list[float]]) -> Findings:
    step_s = sum(each_s[name] * count for name, count in calls.items())
    by_call = {f"{name}, {count} per step": [1e6 * each_s[name]] for name, count in calls.items()}
    return Findings(
        title="the records of every step, one worker, MLP 784-256-10",
        measured=[
            Measured(of="one call, at best", unit="µs of a processor", values=by_call),
            Measured(of="all calls of a step", unit="µs of a processor", values={"records": [1e6 * step_s]}),
            Measured(
                of="a whole step",
                unit="µs of a processor",
                values={name: [1e6 * each for each in times] for name, times in seconds.items()},
            ),
        ],
        ratios=[ratio("with ÷ without", seconds["with"], seconds["without"], 1.01, at_most=True)],
    )


if __name__ == "__main__":
    main()
