"""What the records of every step cost: training with them and without, in turns, with steps of about 1 ms.

python benchmarks/telemetry.py --out telemetry.json
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import RATIO_HEADER, Ratio, arguments, say, table, write
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
        options.rounds, options.steps = 2, 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [(nn.Linear(*ends), nn.ReLU()) for ends in itertools.pairwise(WIDTHS)]
    model = nn.Sequential(*itertools.chain(*layers))
    session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
    batch = (torch.randn(32, WIDTHS[0]), torch.randint(WIDTHS[-1], (32,)))

    def turn() -> float:
        """Seconds of a processor per step, of all threads: what others take away meanwhile does not count."""
        session.step(batch)
        start = time.process_time()
        for _ in range(options.steps):
            session.step(batch)
        return (time.process_time() - start) / options.steps

    seconds: dict[str, list[float]] = {"with": [], "without": []}
    say(f"{options.rounds} rounds of {options.steps} steps with and without records")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name in sorted(seconds, reverse=number % 2 == 0):
                with recording(Path(folder)) if name == "with" else without():
                    seconds[name].append(turn())
        session.close()
    each = [mine / other for mine, other in zip(seconds["with"], seconds["without"], strict=True)]
    # Of pairs of turns, not of medians: what is looked for is much smaller than the drift of a machine.
    low, middle, high = statistics.quantiles(each, n=4)
    found = Ratio(
        name="with ÷ without (and quartiles)", value=middle, low=low, high=high, target=1.01, at_most=True
    )
    step_ms = statistics.median(seconds["without"]) * 1e3
    print(
        table(
            f"steps of {step_ms:.2f} ms", [*RATIO_HEADER[:1], "of pairs", *RATIO_HEADER[2:]], [found.cells()]
        )
    )
    print(f"{(middle - 1) * step_ms * 1e3:.1f} µs per step")
    write(options, benchmark="telemetry", results={"seconds": seconds, "ratio": found.record()})


if __name__ == "__main__":
    main()
