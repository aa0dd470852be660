"""What the records of every step cost: training with them and without, in turns, with steps of about 1 ms.

python benchmarks/telemetry.py --out telemetry.json
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from common import RATIO_HEADER, arguments, interleave, ratio, table, write
from torch import Tensor, nn

import manyhands as mh
from manyhands import telemetry

WIDTHS = (256, 640, 640, 10)  # with 32 samples, about 1 ms on one core
CALLS = ("add_seconds", "count", "event", "step", "timed")


class _Nothing:
    """In the place of whatever is called to record something."""

    def __call__(self, *args: object, **more: object) -> "_Nothing":
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


@contextmanager
def without() -> Iterator[None]:
    """Nothing is recorded or even counted."""
    before: dict[str, Any] = {name: getattr(telemetry, name) for name in CALLS}
    for name in CALLS:
        setattr(telemetry, name, _Nothing())
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(telemetry, name, call)


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """As in a run: a thread writes the file meanwhile."""
    telemetry.open(folder / "worker-0.jsonl", rank=0)
    try:
        yield
    finally:
        telemetry.close()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    parser = arguments("What the records of every step cost.", rounds=40)
    parser.add_argument("--steps", type=int, default=500, help="per turn (default 500)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [(nn.Linear(*ends), nn.ReLU()) for ends in itertools.pairwise(WIDTHS)]
    model = nn.Sequential(*itertools.chain(*layers))
    session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
    batch = (torch.randn(32, WIDTHS[0]), torch.randint(WIDTHS[-1], (32,)))

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
    found = ratio("with ÷ without", seconds["with"], seconds["without"], 1.01, at_most=True)
    step_us = statistics.median(seconds["without"]) * 1e6
    print(table(f"steps of {step_us / 1e3:.2f} ms", RATIO_HEADER, [found.cells()]))
    print(f"{(found.middle - 1) * step_us:.1f} µs per step, by the median round")
    write(options, benchmark="telemetry", results={"seconds": seconds, "ratios": [found.record()]})


if __name__ == "__main__":
    main()
